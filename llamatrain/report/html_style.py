"""The style sheet of pages, for light and dark, and for any width from a telephone's on."""

from llamatrain.report.memory_map import DARK, FACES, LIGHT, kind_colors

RUNS = 8  # number of colors for runs
RUN_COLORS = ("#2f6fd0", "#dd6b3a", "#2f9e6e", "#8a63c9", "#c2255c", "#0f8ea0", "#a07a12", "#5f6b7a")
RUN_COLORS_DARK = ("#6ea8f5", "#ee8a5b", "#57c596", "#b292ec", "#ff7aa8", "#4cc3d4", "#d6b04a", "#a3afbd")


def run_colors(colors: tuple[str, ...]) -> str:
    """Return the CSS rules of the runs' colors."""
    return " ".join(f".c{n} {{ stroke: {color}; --own: {color} }}" for n, color in enumerate(colors))


VARIABLES = """--page: #f6f7f9; --card: #ffffff; --edge: #e3e7ec; --text: #1d2530; --soft: #5b6470; --grid: #e9edf1;
  --train: #2f6fd0; --val: #dd6b3a; --keep: #2f9e6e; --field: #f3f5f8; --peak: #c2255c; --done: #2f6fd0; --rest: #dfe5ec"""
DARK_VARIABLES = """--page: #0f1318; --card: #171c23; --edge: #2a323d; --text: #e8ecf1; --soft: #98a3b1; --grid: #262e38;
  --train: #6ea8f5; --val: #ee8a5b; --keep: #57c596; --field: #1b212a; --peak: #ff7aa8; --done: #6ea8f5; --rest: #2b3440"""

STYLE = f"""
:root {{ color-scheme: light dark; {VARIABLES} }}
{kind_colors(LIGHT)}
{run_colors(RUN_COLORS)}
@media (prefers-color-scheme: dark) {{
  :root {{ {DARK_VARIABLES} }}
  {kind_colors(DARK)}
  {run_colors(RUN_COLORS_DARK)}
}}
* {{ box-sizing: border-box }}
body {{ margin: 0; background: var(--page); color: var(--text); font: 15px/1.5 {FACES} }}
main {{ max-width: 1240px; margin: 0 auto; padding: 28px 20px 48px }}
h1 {{ font-size: 26px; line-height: 1.2; margin: 0; letter-spacing: -0.01em; overflow-wrap: anywhere }}
h2 {{ font-size: 17px; margin: 40px 0 12px }}
p {{ margin: 6px 0; overflow-wrap: anywhere }}
.soft, figcaption span, footer {{ color: var(--soft) }}
section > p.soft {{ margin: -6px 0 12px }}
code, pre {{ font: 13px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; overflow-wrap: anywhere }}
.card, figure {{ background: var(--card); border: 1px solid var(--edge); border-radius: 10px; margin: 0; min-width: 0 }}
figure {{ padding: 14px 18px 10px 10px; overflow: hidden }}
figcaption {{ padding-left: 8px; margin-bottom: 10px; overflow-wrap: anywhere }}
figcaption b {{ font-weight: 600; margin-right: 8px }}
.bar {{ height: 6px; border-radius: 3px; background: var(--rest); margin: 18px 0 14px; overflow: hidden }}
.bar i {{ display: block; height: 100%; background: var(--done) }}
.tiles {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; margin-bottom: 16px }}
.tiles div {{ padding: 12px 16px; background: var(--card); border: 1px solid var(--edge); border-radius: 10px; min-width: 0 }}
.tiles b {{ display: block; font-size: 21px; font-weight: 600; line-height: 1.3; font-variant-numeric: tabular-nums }}
.tiles span {{ color: var(--soft); font-size: 13px; display: block; overflow-wrap: anywhere }}
.charts {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 320px), 1fr)); gap: 16px; margin-top: 16px }}
.plot {{ display: grid; grid-template: 190px 24px / 60px minmax(0, 1fr); padding-right: 14px; font-size: 12px; color: var(--soft);
  font-variant-numeric: tabular-nums }}
.large .plot {{ grid-template-rows: 340px 24px }}
.ys, .xs {{ position: relative }}
.xs {{ grid-column: 2 }}
.ys span {{ position: absolute; right: 9px; transform: translateY(50%); white-space: nowrap; line-height: 1 }}
.xs span {{ position: absolute; top: 6px; transform: translateX(-50%); white-space: nowrap }}
.plot svg {{ width: 100%; height: 100%; overflow: visible; display: block }}
.plot svg * {{ vector-effect: non-scaling-stroke }}
.grid {{ stroke: var(--grid); stroke-width: 1; fill: none }}
polyline {{ fill: none; stroke-width: 2; stroke-linejoin: round; stroke-linecap: round }}
.training {{ stroke: var(--train); --own: var(--train) }}
.validation {{ stroke: var(--val); --own: var(--val) }}
.retained {{ stroke: var(--keep); --own: var(--keep) }}
.noise {{ stroke-width: 1; stroke-opacity: 0.28 }}
.target {{ stroke-width: 1.2; stroke-opacity: 0.6 }}
.dot {{ stroke-width: 7; stroke-linecap: round; stroke-dasharray: none; fill: none }}
.best {{ stroke-width: 12; stroke-opacity: 0.45 }}
.band {{ fill: var(--own); fill-opacity: 0.18; stroke: none }}
.key {{ display: inline-block; width: 18px; height: 0; border-top: 3px solid var(--own); border-radius: 2px;
  vertical-align: middle; margin: 0 6px 2px 0 }}
.key.target {{ stroke-width: 1.2; stroke-opacity: 0.6 }}
.keys {{ display: flex; flex-wrap: wrap; gap: 4px 20px; margin: 10px 8px 6px; font-size: 13px; color: var(--soft) }}
.keys svg {{ width: 12px; height: 12px; margin-right: 6px; vertical-align: -1px }}
.memory .plot {{ grid-template-rows: minmax(240px, 34vw) 24px }}
@media (min-width: 1240px) {{ .memory .plot {{ grid-template-rows: 420px 24px }} }}
.field {{ fill: var(--field) }}
.apart {{ stroke: var(--card); stroke-width: 0.6 }}
.m-peak {{ stroke: var(--peak); stroke-width: 1.5; stroke-dasharray: 5 4 }}
table {{ border-collapse: collapse; width: 100%; font-size: 14px }}
td, th {{ padding: 5px 14px 5px 0; text-align: left; vertical-align: top; overflow-wrap: anywhere; font-weight: 400 }}
th {{ color: var(--soft); font-size: 13px }}
tr + tr td {{ border-top: 1px solid var(--grid) }}
td.n, th.n {{ text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }}
.card {{ padding: 10px 18px }}
.wide {{ overflow-x: auto }}
.wide td, .wide th {{ overflow-wrap: normal }}
section {{ margin-top: 16px }}
.stack > figure + figure {{ margin-top: 16px }}
.two {{ columns: 320px auto; column-gap: 36px }}
dl {{ margin: 0 }}
dl div {{ display: flex; gap: 14px; padding: 4px 0; border-bottom: 1px solid var(--grid); break-inside: avoid; font-size: 14px }}
dl.facts div:last-child {{ border: 0 }}
dt {{ color: var(--soft); flex: 0 0 42% }}
dd {{ margin: 0; min-width: 0; overflow-wrap: anywhere }}
dl.facts dt {{ flex: 0 0 92px }}
.sample {{ display: grid; grid-template-columns: 92px minmax(0, 1fr); gap: 12px; padding: 10px 0;
  border-top: 1px solid var(--grid) }}
.sample:first-child {{ border-top: 0 }}
.sample pre {{ margin: 0; white-space: pre-wrap }}
.sample svg {{ width: 100%; height: 84px; overflow: visible }}
.sample svg * {{ vector-effect: non-scaling-stroke }}
details > summary {{ cursor: pointer; color: var(--soft); padding: 6px 0 }}
footer {{ margin-top: 44px; font-size: 13px }}
@media (max-width: 560px) {{
  main {{ padding: 20px 12px 32px }}
  h1 {{ font-size: 22px }}
  .large .plot {{ grid-template-rows: 240px 24px }}
  .plot {{ grid-template-columns: 52px minmax(0, 1fr) }}
  .xs span:nth-child(even) {{ visibility: hidden }}
  .tiles {{ grid-template-columns: 1fr 1fr; gap: 8px }}
  .tiles b {{ font-size: 18px }}
  .sample {{ grid-template-columns: 1fr; gap: 2px }}
  figure {{ padding: 12px 8px 8px 4px }}
  .card {{ padding: 8px 12px }}
}}
"""
