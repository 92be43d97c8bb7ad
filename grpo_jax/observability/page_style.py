"""The style sheet of a report: the palette of the picture, light and dark."""

from grpo_jax.observability.theme import DARK, LIGHT, Theme


def _variables(theme: Theme) -> str:
    return "".join(f"--{name}:{value};" for name, value in vars(theme).items())


CSS = (
    f":root{{{_variables(LIGHT)}}}\n@media (prefers-color-scheme: dark){{:root{{{_variables(DARK)}}}}}"
    """
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif;
  font-variant-numeric:tabular-nums}
main{max-width:1080px;margin:0 auto;padding:40px 24px 72px}
h1{font-size:28px;line-height:1.2;margin:0;font-weight:650;letter-spacing:-.01em;overflow-wrap:anywhere}
h2{font-size:16px;margin:0 0 12px;font-weight:650}
h3{font-size:13px;margin:20px 0 8px;font-weight:600;color:var(--muted)}
section,details{margin-top:40px}
.status{margin-left:14px;padding:3px 10px;border-radius:99px;font-size:13px;font-weight:600;letter-spacing:0;
  vertical-align:middle;border:1px solid currentColor;color:var(--muted)}
.status.finished{color:var(--generator)}
.status.running{color:var(--learner)}
.status.failed,.error{color:var(--accent)}
.facts,.note,small{color:var(--muted)}
.facts{margin:8px 0 0}
.note{font-size:13px;margin:10px 0 0}
.error{margin:14px 0 0;font-weight:600;overflow-wrap:anywhere}
.verdict{font-size:18px;line-height:1.45;margin:22px 0 0;max-width:46em}
.tiles{display:grid;grid-template-columns:repeat(6,1fr);gap:1px;background:var(--rule);
  border:1px solid var(--rule);border-radius:10px;overflow:hidden}
@media (max-width:960px){.tiles{grid-template-columns:repeat(3,1fr)}}
@media (max-width:560px){.tiles{grid-template-columns:repeat(2,minmax(0,1fr))}}
.tiles div{background:var(--paper);padding:14px 16px}
.tiles h2{font-size:12px;font-weight:500;color:var(--muted);margin:0}
.tiles strong{display:block;font-size:21px;font-weight:620;margin:4px 0 1px;white-space:nowrap}
.tiles small{font-size:12px}
@media (max-width:560px){.tiles div{padding:12px}.tiles strong{font-size:18px}}
img{display:block;width:100%;height:auto}
.wide{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:14px}
th{text-align:left;font-weight:500;font-size:12px;color:var(--muted)}
th,td{padding:7px 18px 7px 0;border-bottom:1px solid var(--rule);vertical-align:top;overflow-wrap:anywhere}
.pairs td:first-child{width:52%;color:var(--muted)}
.list td,.list th{overflow-wrap:break-word}
.list td:last-child:not(:first-child){overflow-wrap:anywhere;min-width:8em}
.timeline{min-width:640px;width:100%;height:auto;display:block}
.timeline .learner{fill:var(--learner)}
.timeline .generator{fill:var(--generator)}
.timeline .publish{fill:var(--accent)}
.timeline .rule{stroke:var(--rule)}
.timeline text{fill:var(--muted);font-size:11px}
.timeline .lane{fill:var(--ink);font-size:13px}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(300px,100%),1fr));gap:28px 24px}
figure{margin:0;min-width:0}
figcaption{font-size:13px;font-weight:600}
.key{margin:2px 0 4px;font-size:12px;display:flex;flex-wrap:wrap;gap:2px 12px;overflow-wrap:anywhere}
.chart{display:block;width:100%;height:auto}
.chart path{fill:none;stroke-width:1.6;stroke-linejoin:round}
.chart .rule{stroke:var(--rule)}
.chart text{fill:var(--muted);font-size:11px}
.key .c0{color:var(--learner)}.chart .c0{stroke:var(--learner)}
.key .c1{color:var(--generator)}.chart .c1{stroke:var(--generator)}
.key .c2{color:var(--accent)}.chart .c2{stroke:var(--accent)}
.key .c3{color:var(--muted)}.chart .c3{stroke:var(--muted)}
.key .c4{color:var(--ink)}.chart .c4{stroke:var(--ink)}
.key .c5{color:var(--learner);opacity:.6}.chart .c5{stroke:var(--learner);opacity:.6}
.chart circle{fill:var(--paper);stroke-width:2}
.gains{max-width:680px}
.gains td,.gains th{vertical-align:middle;white-space:nowrap}
.gains .bar{width:100%}
.gains svg{display:block;width:100%;height:10px}
.gains rect{fill:var(--learner)}
article{border-top:1px solid var(--rule);padding:10px 0 12px}
article p{margin:0 0 6px;font-size:13px;display:flex;gap:12px;flex-wrap:wrap}
article p span{margin-left:auto;color:var(--muted)}
.reward{color:var(--learner)}
pre{margin:0;font:13px/1.45 ui-monospace,Menlo,Consolas,monospace;white-space:pre-wrap;overflow-wrap:anywhere}
pre.prompt{color:var(--muted);margin-bottom:6px}
ul{margin:0;padding-left:1.1em}
summary{cursor:pointer;font-size:16px;font-weight:650}
details>:not(summary){margin-top:12px}
"""
)
