"""How the HTML page looks: colours for light and for dark, and the rules."""

import re
from collections.abc import Sequence

# How JupyterLab, with nbconvert's template of it, and VS Code mark their themes.
_IN_LIGHT = (
    '[data-jp-theme-light="true"]',
    ".vscode-light",
    ".vscode-high-contrast-light",
)
_IN_DARK = (
    '[data-jp-theme-light="false"]',
    ".vscode-dark",
    ".vscode-high-contrast:not(.vscode-high-contrast-light)",
)

# Text is readable on every one of these, also on the tints of the boxes in pictures.
LIGHT = {
    "back": "#ffffff",
    "panel": "#f5f7f9",
    "text": "#1b1f24",
    "quiet": "#57606a",
    "line": "#d4dae0",
    "accent": "#0b5cad",
    "remark": "#8a4b00",
    "tint0": "#cfe3fa",
    "tint1": "#fbe0c3",
    "tint2": "#d3eed6",
    "tint3": "#f6d3dd",
    "tint4": "#e3d9f6",
    "tint5": "#f3ebb4",
    "tint6": "#c9ebeb",
    "tint7": "#e4e0d8",
}
DARK = {
    "back": "#14171a",
    "panel": "#1d2226",
    "text": "#e6e9ec",
    "quiet": "#a0abb6",
    "line": "#39424b",
    "accent": "#84bdf7",
    "remark": "#f0b35e",
    "tint0": "#1f4468",
    "tint1": "#663f10",
    "tint2": "#235234",
    "tint3": "#6b2b40",
    "tint4": "#4a3876",
    "tint5": "#585010",
    "tint6": "#17525a",
    "tint7": "#4a463d",
}

# `&` stands for the element around the report, so that in a notebook nothing else
# changes. What a notebook says of tables and the like is taken back first; pictures
# have their own sizes and places as attributes, which would be taken back as well.
RULES = """
&, & *:not(svg, svg *) { all: revert; }
& { color: var(--text); background: var(--back); max-width: 62rem; text-align: left;
  white-space: normal; letter-spacing: normal; text-transform: none;
  font: 16px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif;
  overflow-wrap: anywhere; }
& * { box-sizing: border-box; }
& h1 { font-size: 1.6rem; line-height: 1.25; margin: 0; }
& h2 { font-size: 1.1rem; margin: 2.2rem 0 .7rem; padding-bottom: .3rem;
  border-bottom: 1px solid var(--line); }
& h3 { font-size: 1rem; margin: 0; }
& p { margin: .3rem 0; max-width: 44rem; }
& ul { margin: .5rem 0; padding-left: 1.2rem; }
& code, & .code { font: .875em ui-monospace, "DejaVu Sans Mono", Menlo, Consolas,
  monospace; color: inherit; background: none; }
& pre { white-space: pre-wrap; margin: 0; }
& .quiet { color: var(--quiet); font-size: .875rem; }
& h3 .quiet { font-weight: 400; }
& .lead { color: var(--quiet); }
& .remark { border-left: 3px solid var(--remark); background: var(--panel);
  border-radius: 0 6px 6px 0; padding: .5rem .9rem; margin: .6rem 0; }
& .remark .advice::before { content: "Instead: "; color: var(--remark);
  font-weight: 600; }
& .verdict { padding-left: 1.2rem; margin: 1rem 0 0; max-width: 44rem; }
& details { margin: .5rem 0; }
& summary { cursor: pointer; }
& summary:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; }
& .axis { border-left: 3px solid var(--accent); padding: .1rem 0 .1rem .9rem;
  margin: .9rem 0; }
& .layout { color: var(--accent); font-weight: 600; }
& .arrays { display: grid; gap: .9rem;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 19rem), 1fr)); }
& .array { border: 1px solid var(--line); border-radius: 8px; padding: .8rem .9rem;
  margin: 0; min-width: 0; }
& .box { overflow-x: auto; }
& .array .box { margin-top: .6rem; }
& .box:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; }
& svg { display: block; }
& svg text { font: 12px ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace;
  fill: var(--text); text-anchor: middle; dominant-baseline: central; }
& svg .label { fill: var(--quiet); }
& svg .start { text-anchor: start; }
& svg .end { text-anchor: end; }
& svg rect { stroke: var(--quiet); stroke-opacity: .45; }
& svg rect.part { stroke: none; }
& table { border-collapse: collapse; width: 100%; font-size: .875rem; }
& th { text-align: left; font-weight: 600; color: var(--quiet);
  white-space: nowrap; }
& th, & td { padding: .45rem .9rem .45rem 0; vertical-align: top; text-align: left;
  border-bottom: 1px solid var(--line); background: none; overflow-wrap: normal; }
& .number { text-align: right; white-space: nowrap;
  font-variant-numeric: tabular-nums; }
& dl { display: grid; gap: .8rem; margin: 0;
  grid-template-columns: repeat(auto-fill, minmax(9.5rem, 1fr)); }
& dt { color: var(--quiet); font-size: .875rem; }
& dd { margin: 0; font-size: 1.05rem; font-variant-numeric: tabular-nums; }
& footer { margin-top: 2.5rem; padding-top: .7rem; border-top: 1px solid var(--line); }
@media (max-width: 54rem) {
  & table, & tbody, & tr, & td { display: block; }
  & thead { position: absolute; clip-path: inset(50%); width: 1px; height: 1px;
    overflow: hidden; white-space: nowrap; }
  & tr { padding: .6rem 0; border-bottom: 1px solid var(--line); }
  & td, & td.number { display: flex; gap: 1rem; justify-content: space-between;
    padding: .12rem 0; border: 0; text-align: right; white-space: normal;
    overflow-wrap: anywhere; }
  & td::before { content: attr(data-label); color: var(--quiet); flex: none; }
}
"""


def css(scope: str) -> str:
    """The style sheet, for what is inside the element that `scope` selects.

    Light or dark is what the notebook around it is, or else the reader's system.

    Args:
      scope: a selector that may be written several times in a row, to count for more
        than the rules of a notebook.

    >>> css(".report").splitlines()[0][:34]
    '.report { --back:#ffffff; --panel:'
    """

    def colours(scheme: dict[str, str], around: Sequence[str] = ("",)) -> str:
        said = "; ".join(f"--{name}:{value}" for name, value in scheme.items())
        where = ", ".join(f"{each} {scope}".strip() for each in around)
        return f"{where} {{ {said} }}"

    tints = [
        f"{strong(scope)} svg .colour{number} {{ fill: var(--tint{number}) }}"
        for number in range(sum(name.startswith("tint") for name in LIGHT))
    ]
    dark = f"@media (prefers-color-scheme: dark) {{ {colours(DARK)} }}"
    # A notebook may have another size of letters, which `rem` would follow.
    rules = re.sub(
        r"(\d*\.?\d+)rem", lambda found: f"{16 * float(found[1]):g}px", RULES
    )
    rules = rules.strip().replace("&", strong(scope))
    themes = [colours(LIGHT, _IN_LIGHT), colours(DARK, _IN_DARK)]
    return "\n".join([colours(LIGHT), dark, *themes, rules, *tints])


def strong(scope: str) -> str:
    """The selector, counting for more than what notebooks say of their output."""
    return scope * 3
