"""Building blocks of the pages: one style sheet, tables, figures that say their numbers in words."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from privtune.accounting import Adjacency, epsilon, explain
from privtune.accounting.registry import formula
from privtune.ledger import RECORD
from privtune.ledger.audits import contradictions
from privtune.numbers import ceil_to, show_epsilon, show_left, show_seconds
from privtune.strategies.laws import say_few_runs
from privtune.study.audits import audits_of
from privtune.tasks import PRETRAINED, rows_note
from privtune.views.record import LEDGER_TABLE, budget_view, ledger_table
from privtune.views.text import (
    EXPECTED,
    NOT_MEASURED,
    budget_line,
    declared_trainings,
    explain_utility,
    public_facts,
    show_params,
    together,
    utility_column,
    utility_name,
)

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from privtune.accounting import Event, Explanation
    from privtune.strategies import Plan
    from privtune.study import ArmStatus, Study
    from privtune.views.record import ArmRecord, BudgetView

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


def render_arm(record: ArmRecord, view: BudgetView) -> str:
    """Return the page of one arm, without scripts: MLflow shows it among the run's artifacts.

    Args:
        record: What is logged of the arm.
        view: The state of the budget.
    """
    lines = [line for line in record.note.splitlines() if line]
    values = {name: value for name, value, step in record.points if step == 0}
    shown = {
        "ε of the procedure": show_epsilon(values["eps/total"], 4)
        if "eps/total" in values
        else "no guarantee",
        "ε of one training (not the promise)": show_epsilon(values["eps/one_run"], 4)
        if "eps/one_run" in values
        else "no guarantee",
        **record.params,
    }
    ledger = record.documents[LEDGER_TABLE]
    return document(
        f"{record.arm}: privacy report",
        Html(f"<h1>{text(record.arm)}</h1>"),
        Html(f'<p class="lead">{text(lines[0])}</p>'),
        *(Html(f"<p>{text(line.replace('**', ''))}</p>") for line in lines[1:]),
        section("Numbers", facts(shown, caption="The arm's guarantee and parameters")),
        section(
            "Charges of the budget",
            table(
                ledger["columns"],
                rows_of(ledger),
                caption="Every charge; costs alone do not add up to the cost of the whole",
                numeric=["ε alone"],
                wide=["event"],
            ),
        ),
        _checking(view),
    )


def render_study(study: Study) -> str:
    """Return the page that ``privtune study compare --html`` writes.

    Args:
        study: A study; arms that have not been released are shown as planned.

    Returns:
        HTML with Plotly inside: it opens without a network.
    """
    arms = study.status()
    view = budget_view(study)
    budget = study.spec.budget
    return document(
        f"{study.name}: hyperparameter tuning under differential privacy",
        Html(
            f'<p class="quiet">PrivTune study report</p><h1>{text(study.name)}</h1>'
            f'<p class="lead">{text(budget_line(budget, view.spent, view.left))}.</p>'
        ),
        _weakened(study),
        _comparison(arms),
        _stages(study),
        *_figures(study, arms),
        _charges(study, view),
        _audits(audits_of(study)),
        _declared(study),
        privacy_statement(study, arms, view),
        _checking(view),
        plotly=True,
    )


def _weakened(study: Study) -> Html:
    said = []
    if study.spec.seed is not None:
        said.append(
            f"<strong>Fixed seed {study.spec.seed}.</strong> No guarantee holds against whoever knows the "
            "seed."
        )
    if any(rows_note(plan.public_facts) for plan in study.plans):
        said.append(
            "<strong>Rows of a query, declared independent.</strong> That each comes from one protected "
            "record was not checked."
        )
    said += [f"<strong>Training {text(words)}.</strong>" for words in declared_trainings(study)]
    return Html("".join(f'<p class="lead warn">{line}</p>' for line in said))


def _comparison(arms: tuple[ArmStatus, ...]) -> Html:
    utility, values = utility_column(arms)
    rows = []
    for arm in arms:
        release = arm.release
        seconds = None if release is None else release.cost.wall_seconds
        params = {} if release is None else release.params
        rows.append(
            (
                arm.plan.arm,
                arm.plan.strategy,
                show_epsilon(arm.guarantee.epsilon),
                values.get(arm.plan.arm, arm.state),
                f"{arm.plan.expected_gradient_evaluations:,.0f}",
                show_seconds(seconds),
                show_params(params) or "—",
            )
        )
    columns = [
        "arm",
        "strategy",
        "ε",
        utility,
        "gradients",
        "seconds",
        "released parameters",
    ]
    return section(
        "Comparison",
        table(
            columns,
            rows,
            caption="What each arm reached, at what ε, at what cost",
            numeric=["ε", utility, "gradients", "seconds"],
        ),
        Html(f'<p class="quiet">{text(explain_utility(arms))}</p>'),
        Html(f'<p class="quiet">{text(EXPECTED)}</p>'),
        anchor="comparison",
    )


def _stages(study: Study) -> Html:
    if not study.stages:
        return Html("")
    rows = []
    for stage in study.stages:
        cost, noise = show_epsilon(stage.guarantee.epsilon), f"{stage.plan.scale:.4g}"
        shown = stage.words or stage.state
        rows.append((stage.plan.arm, stage.plan.stage.type, cost, noise, shown))
    return section(
        "Before the arms",
        table(
            ["stage", "type", "ε", "noise", "released"],
            rows,
            caption="What was released once, and is shared by all arms",
            numeric=["ε", "noise"],
            wide=["released"],
        ),
        Html(
            '<p class="quiet">Each is a charge of its own, on top of those of the arms. The noise is the '
            "standard deviation on each of its sums; what was released follows from these alone.</p>"
        ),
        anchor="stages",
    )


def _figures(study: Study, arms: tuple[ArmStatus, ...]) -> list[Html]:
    from privtune import plots

    released = [arm.release for arm in arms if arm.release is not None]
    shown = [_budget_figure(study)]
    name = utility_name(arms)
    measured = [value for value in utility_column(arms)[1].values() if value != NOT_MEASURED]
    if measured and " or " not in name:  # losses and accuracies have no axis in common
        shown.append(
            section(
                "Utility against ε",
                figure(
                    "utility",
                    plots.plot_utility(study, metric=name, arms=arms),
                    caption=f"{explain_utility(arms)} It stands against the ε of the arm's "
                    "procedure, on the test split with 95% intervals. The hollow marker is the ε of the "
                    "released training alone, which "
                    "forgets the search.",
                ),
            )
        )
    if released:
        shown.append(
            section(
                "Cost",
                figure(
                    "cost",
                    plots.plot_cost(study, arms=arms),
                    caption="Gradient evaluations and time of each arm; hatched: the plan's "
                    "expectation.",
                ),
            )
        )
    if any(release.curves for release in released):
        shown.append(
            section(
                "What the trainings did with their hyperparameters",
                figure(
                    "trajectories",
                    plots.plot_trajectories(study, arms=arms),
                    caption="Released curves by step. Each is computed from noisy, paid-for releases.",
                ),
            )
        )
    laws: dict[object, list[Plan]] = {}
    for plan in (arm.plan for arm in arms if arm.plan.runs is not None):
        laws.setdefault((plan.runs, plan.event), []).append(plan)
    return shown + [_law_figure(study, plans, number) for number, plans in enumerate(laws.values())]


def _budget_figure(study: Study) -> Html:
    from privtune import plots
    from privtune.plots._study import shares

    parts = table(
        ["charge", "ε added", "ε alone"],
        [
            (label, show_epsilon(added, 4), show_epsilon(alone, 4))
            for label, added, alone in shares(study)
        ],
        caption="What each charge added to the composition",
        numeric=["ε added", "ε alone"],
    )
    return section(
        "The budget",
        figure(
            "budget",
            plots.plot_budget(study),
            caption="What each arm added to the budget, in the order of charging. The parts are "
            "increments of the composition; costs alone do not add up.",
            numbers=parts,
        ),
    )


def _law_figure(study: Study, plans: list[Plan], number: int) -> Html:
    """Show the law of arms that draw by the same one, at the same cost."""
    from privtune import plots
    from privtune.plots._study import costs_at_other_means

    plan = plans[0]
    law: Any = plan.runs
    costs = table(
        ["mean runs", "ε"],
        [(f"{mean:g}", show_epsilon(cost, 4)) for mean, cost in costs_at_other_means(study, plan)],
        caption="ε of the selection at other means, with the same noise",
        numeric=["mean runs", "ε"],
    )
    return section(
        f"The number of runs of {', '.join(plan.arm for plan in plans)}",
        figure(
            f"runs-{number}",
            plots.plot_runs(study, arm=plan.arm),
            caption="The law from which the secret number of runs K was drawn, and what the "
            "selection would cost at other means with the same noise. It draws "
            f"{say_few_runs(law)}. What K was is sealed.",
            numbers=costs,
        ),
    )


def _charges(study: Study, view: BudgetView) -> Html:
    document = ledger_table(view.charges, study)
    columns = ["charge", "study", "arm", "state", "ε alone", "why this ε"]
    why = {event: _why(study, event) for event in {charge.event for charge in view.charges}}
    rows = [
        (*row[:5], why[charge.event])
        for row, charge in zip(rows_of(document), view.charges, strict=True)
    ]
    return section(
        "Every charge",
        table(
            columns,
            rows,
            caption=f"All charges of budget {study.spec.budget.name}",
            numeric=["ε alone"],
            wide=["why this ε"],
        ),
        anchor="charges",
    )


def _audits(records: list[dict[str, Any]]) -> Html:
    from privtune import plots

    if not records:
        return Html("")
    rows = [
        (
            f"{record['arm']}: {row['mechanism']}",
            *(show_left(row[name], 4) for name in ("audited", "lower")),
            show_epsilon(row["reported"], 4),
            f"{record['published']:g}",
            f"{row['runs']:,}",
            f"{record['seed']}",
        )
        for record in records
        for row in record["rows"]
    ]
    untouched = dict.fromkeys(line for record in records for line in record["untouched"])
    columns = ["of", "audited ≤", "lower ≤", "reported ≤", "published", "runs", "seed"]
    numbers = table(
        columns,
        rows,
        caption=f"Bounds on ε from below, by experiment, at {records[0]['confidence']:.0%} confidence each",
        numeric=columns[1:],
    )
    return section(
        "Audits",
        *(Html(f'<p class="lead warn">{text(said)}</p>') for said in contradictions(records)),
        numbers,
        figure(
            "audits",
            plots.plot_audits(records),
            caption="What experiments on made-up records found, what the worst mechanism costs, what is "
            "reported, and what the budget promises: from left to right if all is well.",
        ),
        Html(f'<p class="quiet">Nothing is said of {text("; nor of ".join(untouched))}.</p>'),
        anchor="audits",
    )


def _declared(study: Study) -> Html:
    return section(
        "Declared public",
        Html(
            '<p class="quiet">What the numbers above rest on and no guarantee covers. Rates, averages '
            "and scores are computed with the declared numbers of records.</p>"
        ),
        *(facts(known, caption=arms) for arms, known in public_facts(study.plans)),
        anchor="public",
    )


def _why(study: Study, event: Event) -> Html:
    budget = study.spec.budget
    tree = explain(event, budget.delta, adjacency=budget.adjacency)
    return details(formula(event), Html(f'<ul class="tree">{_node(tree)}</ul>'))


def _node(node: Explanation) -> str:
    saved = "" if node.saved is None else f"; leaving it out would save {show_left(node.saved, 4)}"
    line = f"{text(node.text)}: <strong>ε = {show_epsilon(node.epsilon, 4)}</strong> by {text(node.method)}"
    children = "".join(_node(child) for child in node.children)
    inner = f'<ul class="tree">{children}</ul>' if children else ""
    return f"<li>{line}{saved}{inner}</li>"


def _checking(view: BudgetView) -> Html:
    certificate: Any = view.certificate
    name = certificate["budget"]["terms"]["name"]
    return section(
        "How to check it",
        Html(
            "<p>Everybody can edit a page. The record is the ledger, and its certificate checks itself: "
            f"<code>privtune budget verify --certificate {text(name)}.certificate.json</code>. It holds "
            "the events of this page, from which every ε follows.</p>"
        ),
        facts(
            {
                "Chain head": Html(f"<code>{text(certificate['head'])}</code>"),
                "Digest of the certificate": Html(f"<code>{text(certificate['digest'])}</code>"),
                "Libraries": ", ".join(f"{k} {v}" for k, v in certificate["libraries"].items()),
            },
            caption="What the certificate is known by",
        ),
        anchor="check",
    )


_NEIGHBOURS = {
    Adjacency.ADD_REMOVE: "is in the data or not",
    Adjacency.REPLACE_ONE: "is what it is or is replaced by any other",
}


def run_and_procedure(study: Study, arms: tuple[ArmStatus, ...]) -> list[tuple[str, float, float]]:
    """Return (arm, ε of one training, ε of the whole procedure), at the budget's δ."""
    budget = study.spec.budget
    return [
        (
            arm.plan.arm,
            epsilon(arm.plan.training.event, budget.delta, adjacency=budget.adjacency).epsilon,
            arm.guarantee.epsilon,
        )
        for arm in arms
    ]


def privacy_statement(study: Study, arms: tuple[ArmStatus, ...], view: BudgetView) -> Html:
    """Return the statement as a section of a page.

    Args:
        study: The study.
        arms: Its arms.
        view: The state of its budget.
    """
    budget = study.spec.budget
    terms = view.certificate["budget"]["terms"]
    unit = terms["unit"]
    dataset = terms["dataset"] or f"the private data of task {study.spec.task_name}"
    spent = ceil_to(view.spent.epsilon, 3)
    rows = [
        (name, show_epsilon(one), show_epsilon(total))
        for name, one, total in run_and_procedure(study, arms)
    ]
    rows.append(("everything charged to the budget", "—", show_epsilon(spent)))
    return section(
        "Privacy statement",
        Html(
            f'<p class="lead">Whatever anybody learns from everything released on this budget, they '
            f"would have learnt almost the same whether any single {unit} "
            f"{_NEIGHBOURS[budget.adjacency]}. How nearly is measured by "
            f"<strong>ε = {show_epsilon(spent)} at δ = {budget.delta:g}</strong>; the limit that was set "
            f"beforehand is ε = {budget.epsilon:g}.</p>"
        ),
        _paragraph("What is protected.", f"Every {unit} of {dataset} ({budget.adjacency})."),
        _paragraph("What the number means.", meaning(spent, budget.delta, unit)),
        _paragraph(
            "Why there are two numbers.",
            "Choosing hyperparameters looks at the data again and again. The ε of one training, "
            "which training libraries report, forgets the search; the ε of the procedure counts it. "
            "Only the second is a promise to the people in the data.",
        ),
        table(
            ["", "ε of one training (not the promise)", "ε of the procedure"],
            rows,
            caption=f"Run ε and procedure ε, both at δ = {budget.delta:g}, {budget.adjacency}",
            numeric=["ε of one training (not the promise)", "ε of the procedure"],
        ),
        Html(f'<p class="quiet">The last line is known {text(together(view.spent))}.</p>'),
        _paragraph("What left the trust boundary.", _released(study, arms)),
        _paragraph("What did not.", _sealed(arms)),
        _paragraph("What this does not promise.", _limits(study)),
        Html('<div class="sign"><div>Name, role</div><div>Date</div><div>Signature</div></div>'),
        anchor="statement",
    )


def meaning(spent: float, delta: float, unit: str = RECORD) -> str:
    """Return what (ε, δ) means for one unit, a person's record unless it is more, in words."""
    if not math.isfinite(spent):
        return "Nothing: something that was charged has no guarantee at all."
    factor = math.exp(min(spent, 700.0))
    certainty = (factor + delta) / (factor + 1.0)
    # Shown with enough digits that it never rounds up to certainty.
    digits = max(1, math.ceil(-math.log10(max(1.0 - certainty, 1e-12))) - 1)
    right = f"{ceil_to(certainty, digits + 2):.{digits}%}"
    one, it = ("person's record", "person") if unit == RECORD else (unit, unit)
    return (
        f"No outcome becomes more than e^{spent:.3f} = {ceil_to(factor, 1):,.1f} times as likely through one "
        f"{one}, but for a part of probability {delta:g}. Somebody who is 50% sure that a "
        f"{it} is in the data, who knows everything else and can compute without limits, is right "
        f"at most {right} of the time after seeing all releases. This is a worst case; "
        "smaller is better, and values below 1 are strong."
    )


def _released(study: Study, arms: tuple[ArmStatus, ...]) -> str:
    lines = [f"stage {s.plan.arm}: {s.words}" for s in study.stages if s.words]
    lines += [
        f"{arm.plan.arm}: {', '.join(arm.plan.released)}" for arm in arms if arm.release is not None
    ]
    return "; ".join(lines) + "." if lines else "Nothing yet."


def _sealed(arms: tuple[ArmStatus, ...]) -> str:
    lines = [f"{arm.plan.arm}: {', '.join(arm.plan.sealed)}" for arm in arms]
    return "; ".join(lines) + "."


def _limits(study: Study) -> str:
    parts = [
        "Records of a test split that the task declares public are not protected.",
        "Who can read the curator's database, or watches its machine while a sealed round runs, is "
        "inside the trust boundary.",
        "Noise is drawn in floating point.",
    ]
    if study.spec.seed is not None:
        parts.insert(
            0,
            f"This study was run with the fixed seed {study.spec.seed}: nothing is promised against "
            "anybody who knows it.",
        )
    if any(rows_note(plan.public_facts) for plan in study.plans):
        parts.insert(
            0,
            "The records are rows of a query that were declared, not checked, to come from one protected "
            "record each: where one comes from several, its people are protected less than is said here.",
        )
    for words in declared_trainings(study):
        parts.insert(
            0, f"Training is {words}: what is said here holds if it does what was declared."
        )
    known = {plan.public_facts.get(PRETRAINED) for plan in study.plans}
    parts += [
        f"Training started from public weights: {said}." for said in sorted(filter(None, known))
    ]
    return " ".join(parts)


def _paragraph(head: str, body: str) -> Html:
    return Html(f"<p><strong>{text(head)}</strong> {text(body)}</p>")
