"""How the HTML looks: colours for light and for dark, and the rules."""

CLASS = "shardmap-report"
"""The class of the element around a document."""

# Light and dark. Text is readable on every one of these, also on the tints of the boxes
# in pictures.
PALETTE = {
    "back": ("#ffffff", "#14171a"),
    "panel": ("#f5f7f9", "#1d2226"),
    "text": ("#1b1f24", "#e6e9ec"),
    "quiet": ("#57606a", "#a0abb6"),
    "line": ("#d4dae0", "#39424b"),
    "accent": ("#0b5cad", "#84bdf7"),
    "warning": ("#8a4b00", "#f0b35e"),
    "tint0": ("#cfe3fa", "#1f4468"),
    "tint1": ("#fbe0c3", "#663f10"),
    "tint2": ("#d3eed6", "#235234"),
    "tint3": ("#f6d3dd", "#6b2b40"),
    "tint4": ("#e3d9f6", "#4a3876"),
    "tint5": ("#f3ebb4", "#585010"),
    "tint6": ("#c9ebeb", "#17525a"),
    "tint7": ("#e4e0d8", "#4a463d"),
}
COLOURS = 8
"""The number of tints, which shards use in turn."""

# How JupyterLab, with nbconvert's template of it, and VS Code mark their themes.
_THEMES = {
    '[data-jp-theme-light="true"]': "light",
    ".vscode-light": "light",
    ".vscode-high-contrast-light": "light",
    '[data-jp-theme-light="false"]': "dark",
    ".vscode-dark": "dark",
    ".vscode-high-contrast:not(.vscode-high-contrast-light)": "dark",
}

# The class three times, for a higher specificity than that of a notebook's rules.
_SCOPE = f".{CLASS}" * 3

# All rules are inside of the scope, so that nothing else in a notebook changes. A
# notebook's rules for tables and the like are reverted first. Lengths are in pixels, as
# `rem` would follow the font size of a notebook.
_RULES = """
  &, & * { all: revert; }
  & { color-scheme: light dark; color: var(--text); background: var(--back);
    box-sizing: border-box; display: block; max-width: 992px; padding: 16px;
    text-align: left; white-space: normal; letter-spacing: normal;
    text-transform: none; overflow-wrap: anywhere;
    font: 16px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
  &.page { max-width: none; margin: 0; padding: 26px 16px 48px; }
  &.page main { max-width: 992px; margin: 0 auto; }
  & * { box-sizing: border-box; }
  & h1 { font-size: 26px; line-height: 1.25; margin: 0; }
  & h2 { font-size: 18px; margin: 35px 0 11px; padding-bottom: 5px;
    border-bottom: 1px solid var(--line); }
  & h3 { font-size: 16px; margin: 0; }
  & p { margin: 5px 0; max-width: 704px; }
  & header { margin-bottom: 16px; }
  & header p { color: var(--quiet); }
  & code, & pre, & .grid, & .copies { font: 14px/1.4 ui-monospace, "DejaVu Sans Mono",
    Menlo, Consolas, monospace; color: inherit; background: none; }
  & pre { white-space: pre-wrap; margin: 0; }
  & .quiet, & .quiet code { color: var(--quiet); font-size: 14px; }
  & .warning { border-left: 3px solid var(--warning); background: var(--panel);
    border-radius: 0 6px 6px 0; padding: 8px 14px; margin: 10px 0; }
  & details { margin: 8px 0; }
  & summary { cursor: pointer; }
  & summary:focus-visible, & .scrolling:focus-visible {
    outline: 2px solid var(--accent); outline-offset: 2px; }
  & .card { border-left: 3px solid var(--accent); padding: 2px 0 2px 14px;
    margin: 14px 0; }
  & .scrolling { overflow-x: auto; }
  & .rows { border-collapse: collapse; font-size: 14px; overflow-wrap: normal; }
  & .titled { width: 100%; }
  & .rows th, & .rows td { padding: 7px 0 0 14px; vertical-align: top;
    text-align: right; font-variant-numeric: tabular-nums; }
  & .rows th { color: var(--quiet); white-space: nowrap; }
  & .rows th:first-child, & .rows td:first-child { padding-left: 0;
    text-align: left; }
  & .rows .notes td { padding: 0 0 7px 16px; border-bottom: 1px solid var(--line);
    overflow-wrap: anywhere; }
  & .grid { border-spacing: 3px; margin: 8px 0; font-size: 12px;
    overflow-wrap: normal; }
  & .grid th, & .grid caption { color: var(--quiet); font-weight: 400;
    text-align: center; }
  & .grid caption { text-align: left; }
  & .grid th, & .grid td { min-width: 32px; padding: 4px; text-align: center; }
  & .shard { border: 1px solid var(--line); border-radius: 4px; }
  & .copies { display: inline-block; padding: 4px 14px; margin: 3px 8px 6px 0;
    color: var(--text); background: var(--back); border: 1px solid var(--quiet);
    box-shadow: 3px 3px var(--back), 4px 4px var(--quiet); }
  @media (max-width: 864px) {
    & { line-height: 1.4; }
    & .titled, & .titled tbody { display: block; }
    & .titled thead { position: absolute; clip-path: inset(50%); width: 1px;
      height: 1px; overflow: hidden; white-space: nowrap; }
    & .titled tr { display: grid; grid-template-columns: 1fr 1fr; column-gap: 16px;
      padding-top: 10px; }
    & .titled td:first-child { grid-column: 1 / -1; }
    & .titled td { display: flex; gap: 8px; justify-content: space-between;
      padding: 2px 0; overflow-wrap: anywhere; }
    & .titled td::before { content: attr(data-label); color: var(--quiet);
      flex: none; }
    & .titled .notes { padding-top: 0; }
    & .titled .notes td { display: block; text-align: left; }
    & .titled .notes td::before { content: none; }
  }
"""


def _css() -> str:
    colours = "".join(
        f"  --{name}: light-dark({light}, {dark});\n"
        for name, (light, dark) in PALETTE.items()
    )
    themes = "".join(
        f"{theme} {_SCOPE} {{ color-scheme: {scheme}; }}\n"
        for theme, scheme in _THEMES.items()
    )
    return f"{_SCOPE} {{\n{colours}{_RULES.strip(chr(10))}\n}}\n{themes}".strip()


CSS = _css()
"""The style sheet. Its light or dark scheme is a notebook's, else the system's."""
