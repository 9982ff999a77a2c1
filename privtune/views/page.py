"""Building blocks of the pages: one style sheet, tables, figures that say their numbers in words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import plotly.graph_objects as go

_STYLE = """
:root{color-scheme:light dark;--ink:#1c2430;--quiet:#56606f;--line:#d9dee7;--paper:#fff;
--panel:#f5f7fb;--accent:#2f6fdd}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ef;--quiet:#a3adbd;--line:#39414f;--paper:#14181f;
--panel:#1d232d;--accent:#7aa7ff}}
*{box-sizing:border-box}
body{font:16px/1.55 system-ui,sans-serif;color:var(--ink);background:var(--paper);margin:0}
main{max-width:62rem;margin:0 auto;padding:1.5rem 1rem 4rem}
h1{font-size:1.7rem;line-height:1.25;margin:.5rem 0}
h2{font-size:1.25rem;margin:2.6rem 0 .6rem}
h3{font-size:1.02rem;margin:1.4rem 0 .4rem}
a{color:var(--accent)}
.skip{position:absolute;left:-99rem}
.skip:focus{left:1rem;top:.5rem;background:var(--paper);padding:.4rem .8rem}
.lead{font-size:1.12rem;background:var(--panel);border-left:4px solid var(--accent);padding:.9rem 1.1rem}
.quiet{color:var(--quiet);font-size:.92rem}
.warn{border-left-color:#d1600a}
.scroll{overflow-x:auto}
.scroll:focus{outline:2px solid var(--accent)}
table{border-collapse:collapse;width:100%;font-size:.94rem;font-variant-numeric:tabular-nums}
caption{text-align:left;color:var(--quiet);padding:.2rem 0 .5rem}
th,td{text-align:left;vertical-align:top;padding:.42rem .7rem .42rem 0;border-bottom:1px solid var(--line)}
th{font-weight:600}
th.n,td.n{text-align:right}
td.w{overflow-wrap:anywhere;min-width:14rem}
figure{margin:1rem 0 0}
figcaption{color:var(--quiet);font-size:.92rem}
.plot{width:100%;min-width:0}
details{margin:.4rem 0}
li{overflow-wrap:anywhere}
summary{cursor:pointer;color:var(--accent)}
ul.tree{list-style:none;margin:.2rem 0;padding-left:1.1rem;border-left:1px solid var(--line)}
code{font:.9em ui-monospace,monospace;overflow-wrap:anywhere}
.sign{display:flex;flex-wrap:wrap;gap:1rem 3rem;margin-top:2.2rem}
.sign div{flex:1 1 14rem;border-top:1px solid var(--quiet);padding-top:.3rem}
@media print{details>*{display:block}.skip{display:none}}
"""

# Plotly takes no colours from the page, so its text and grid follow the reader's scheme by hand.
_SCRIPT = """
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
"""


class Html(str):
    """Text that is HTML already. Everything else is escaped when it gets into a page."""

    __slots__ = ()


def text(value: object) -> Html:
    """Return a value as HTML: escaped, unless it is HTML."""
    return value if isinstance(value, Html) else Html(escape(str(value)))


def section(title: str, *parts: object, anchor: str = "") -> Html:
    """Return a titled section."""
    name = f' id="{escape(anchor)}"' if anchor else ""
    body = "\n".join(text(part) for part in parts)
    return Html(f"<section{name}><h2>{text(title)}</h2>\n{body}\n</section>")


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    caption: str,
    numeric: Sequence[str] = (),
    wide: Sequence[str] = (),
) -> Html:
    """Return a table that scrolls by itself on a narrow screen; the first cell heads its row."""
    kinds = ["n" if c in numeric else "w" if c in wide else "" for c in columns]

    def cell(tag: str, kind: str, value: object, scope: str = "") -> str:
        attributes = f' class="{kind}"' if kind else ""
        attributes += f' scope="{scope}"' if scope else ""
        return f"<{tag}{attributes}>{text(value)}</{tag}>"

    head = "".join(cell("th", k, c, "col") for c, k in zip(columns, kinds, strict=True))
    lines = []
    for row in rows:
        first, *rest = row
        line = cell("th", kinds[0], first, "row")
        line += "".join(cell("td", k, v) for v, k in zip(rest, kinds[1:], strict=True))
        lines.append(f"<tr>{line}</tr>")
    label = escape(caption, quote=True)
    return Html(
        f'<div class="scroll" tabindex="0" role="region" aria-label="{label}"><table>'
        f"<caption>{text(caption)}</caption><thead><tr>{head}</tr></thead>"
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def facts(values: Mapping[str, object], *, caption: str) -> Html:
    """Return names and values as a table of two columns."""
    return table(["", "value"], values.items(), caption=caption, wide=["value"])


def details(summary: object, *parts: object) -> Html:
    """Return content that unfolds."""
    body = "\n".join(text(part) for part in parts)
    return Html(f"<details><summary>{text(summary)}</summary>{body}</details>")


def figure(name: str, plot: go.Figure, *, caption: str, numbers: Html | None = None) -> Html:
    """Return a figure with its caption and, for who cannot see it, its numbers as a table.

    Args:
        name: Unique in the page.
        plot: The figure.
        caption: What it shows, in words.
        numbers: The same as a table.
    """
    # "</" would end the script element early.
    data = plot.to_json().replace("</", "<\\/")
    label = escape(caption, quote=True)
    shown = "" if numbers is None else details("The numbers", numbers)
    height = int(plot.layout.height or 340)
    return Html(
        f'<figure><div class="plot" id="{name}" role="img" aria-label="{label}" '
        f'style="height:{height}px"></div>'
        f'<script type="application/json" id="{name}-data">{data}</script>'
        f"<figcaption>{text(caption)}</figcaption>{shown}</figure>"
    )


def document(title: str, *parts: object, plotly: bool = False) -> str:
    """Return a whole page that needs nothing from outside.

    Args:
        title: Title of the page.
        parts: Its content.
        plotly: Whether it has figures; Plotly is then part of the page.
    """
    scripts = ""
    if plotly:
        from plotly.offline import get_plotlyjs

        scripts = f"<script>{get_plotlyjs()}</script>\n<script>{_SCRIPT}</script>"
    body = "\n".join(text(part) for part in parts)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<link rel="icon" href="data:,">'
        f"<title>{text(title)}</title><style>{_STYLE}</style></head>\n<body>"
        '<a class="skip" href="#content">Skip to the content</a>'
        f'<main id="content">\n{body}\n</main>\n{scripts}\n</body></html>\n'
    )


def rows_of(document: Mapping[str, Any]) -> list[list[object]]:
    """Return the rows of a table in MLflow's form (columns and data)."""
    return [list(row) for row in document["data"]]
