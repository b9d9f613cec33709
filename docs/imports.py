"""Draw what imports what: ``python docs/imports.py > docs/imports.svg``."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "minineo"
PARTS = {  # from what imports nothing to what imports all
    "transformer": "the model",
    "cores": "the cores of a CPU",
    "cuda": "kernels",
    "device": "CPU or GPU",
    "checkpoints": "files to weights",
    "generation": "the loop over time",
    "study": "what compares and explains",
    "__init__": "the public names",
    "cli": "the command line",
}
LINE, BOX, LEFT = 56, 36, 250  # heights, and the width of a box


def imports():
    """Return the pairs of a part and another one that it imports."""
    found = set()
    for path in sorted(PACKAGE.rglob("*.py")):
        folders = path.relative_to(PACKAGE).parts
        part = folders[0].removesuffix(".py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.ImportFrom) and node.level == len(folders)):
                continue  # all imports of other parts are relative, from the package itself
            for name in (
                [node.module.split(".")[0]] if node.module else [a.name for a in node.names]
            ):
                other = name if name in PARTS else "__init__"
                found |= {(part, other)} - {(part, part)}
    return found


def picture():
    """Return the picture: a box for each part, an arrow for each import."""
    order = list(PARTS)
    height = LINE * len(order)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="520" viewBox="0 0 520 {height}" '
        'font-family="sans-serif" font-size="14">',
        f'<rect width="520" height="{height}" fill="white"/>',
        '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="9" markerHeight="9" '
        'markerUnits="userSpaceOnUse" orient="auto"><path d="M0 0L8 4L0 8z" fill="#1f5fa8"/></marker>',
    ]
    for part, other in sorted(imports()):
        start, stop = order.index(part), order.index(other)
        reach = 30 + 38 * (start - stop)  # how far the arrow swings out
        y, end = LINE * start + LINE / 2 - 6, LINE * stop + LINE / 2 + 6
        x = LEFT + 12
        lines.append(
            f'<path d="M{x} {y}C{x + reach} {y} {x + reach} {end} {x + 3} {end}" fill="none" '
            f'stroke="#1f5fa8" stroke-width="1.5" stroke-opacity="0.7" marker-end="url(#tip)">'
            f"<title>{part} imports {other}</title></path>"
        )
    for place, (part, what) in enumerate(PARTS.items()):
        y = LINE * place + (LINE - BOX) / 2
        lines += [
            f'<rect x="10" y="{y}" width="{LEFT}" height="{BOX}" rx="5" fill="#eef3f9" '
            'stroke="#1f5fa8"/>',
            f'<text x="20" y="{y + 23}"><tspan font-weight="bold">{part}</tspan> {what}</text>',
        ]
    return "\n".join([*lines, "</svg>\n"])


if __name__ == "__main__":
    print(picture(), end="")
