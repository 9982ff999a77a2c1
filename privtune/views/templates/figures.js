// Plotly takes no colours from the page, so its text and grid follow the reader's scheme by hand.
(function(){
var dark=window.matchMedia('(prefers-color-scheme: dark)');
function paint(){
 var ink=dark.matches?'#d5dae3':'#3c4656';
 document.querySelectorAll('.plot').forEach(function(node){
  var update={'font.color':ink};
  (node.layout&&node.layout.annotations||[]).forEach(function(a,i){
   update['annotations['+i+'].font.color']=ink;});
  Plotly.relayout(node,update);});
}
document.querySelectorAll('.plot').forEach(function(node){
 var spec=JSON.parse(document.getElementById(node.id+'-data').textContent);
 if(window.innerWidth<600){
  var lay=spec.layout;lay.margin={l:48,r:8,t:34,b:48};
  if(lay.meta&&lay.meta.sideBySide){
   lay.height*=2;node.style.height=lay.height+'px';
   lay.xaxis.domain=[0,1];lay.xaxis2.domain=[0,1];
   lay.yaxis.domain=[0.6,1];lay.yaxis2.domain=[0,0.4];
   (lay.annotations||[]).forEach(function(a,i){a.x=0.5;a.y=i?0.4:1;});
   (lay.shapes||[]).forEach(function(s){if(s.yref==='paper'){s.y0=0.6;s.y1=1;}});
  }
 }
 Plotly.newPlot(node,spec.data,spec.layout,{responsive:true,displayModeBar:false});
});
paint();dark.addEventListener('change',paint);
})();
