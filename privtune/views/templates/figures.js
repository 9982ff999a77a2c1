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
  var lay=spec.layout;lay.margin={l:48,r:8,t:lay.margin.t,b:48};
  if(lay.meta&&lay.meta.sideBySide){
   var n=Object.keys(lay).filter(function(k){return /^xaxis/.test(k);}).length;
   var low=function(i){return 1-(i+1)/n+(i<n-1?.3/n:0);},high=function(i){return 1-i/n;};
   lay.height*=n;node.style.height=lay.height+'px';
   for(var i=0;i<n;i++){
    var of=i?i+1:'';
    lay['xaxis'+of].domain=[0,1];lay['xaxis'+of].nticks=3;
    lay['yaxis'+of].domain=[low(i),high(i)];lay['yaxis'+of].showticklabels=true;
   }
   (lay.annotations||[]).forEach(function(a,i){a.x=1;a.xanchor="right";a.y=high(i);});
   (lay.shapes||[]).forEach(function(s){if(s.yref==='paper'){s.y0=low(0);s.y1=1;}});
  }
 }
 Plotly.newPlot(node,spec.data,spec.layout,{responsive:true,displayModeBar:false});
});
paint();dark.addEventListener('change',paint);
})();
