"""Write the pictures of docs/internals.md: the path of one kernel, one cotangent and one proof.

python docs/picture_of_paths.py
"""

import pathlib
from xml.sax.saxutils import escape

INK, DIM, LINE, FILL = "#1d2129", "#565e6a", "#9aa4b1", "#e9f1fa"
WIDTH, HEIGHT, GAP = 216, 86, 28

# From each picture to its title and its stops: a heading, the lines below it, the module.
PATHS = {
    "path_of_a_kernel": (
        "The path of one kernel call",
        [
            (
                "traced",
                ["the kernel's rule and the user's", "annotations are noted"],
                "types/calls/pallas_call.py",
            ),
            (
                "bound",
                ["Primitive.bind_with_trace:", "its row in the table of laws"],
                "types/funnel.py, laws.py",
            ),
            (
                "judged",
                ["declared by name, or proven", "by the kernel's own jaxpr"],
                "types/calls/opaque.py",
            ),
            (
                "planned",
                ["the rule's answer: the types of", "operands and results, once"],
                "types/calls/pallas_call.py",
            ),
            (
                "cast",
                ["operands get their types; the", "call keeps the results'"],
                "door/internals.py",
            ),
            ("tagged", ["the lowered custom call says", "what it does"], "types/calls/lowering.py"),
        ],
    ),
    "path_of_a_cotangent": (
        "The path of one cotangent through a custom_vjp",
        [
            (
                "wrapped",
                ["one wrapper around bwd,", "its stages in a list"],
                "cotangents/custom_vjp.py",
            ),
            ("traced", ["bwd's jaxpr, and fwd's,", "each traced once"], "cotangents/traced.py"),
            (
                "origins",
                ["its inputs, and the axes", "it was summed over"],
                "cotangents/origins.py",
            ),
            (
                "judged",
                ["a share, the full sum,", "or refused: can't be told"],
                "cotangents/bwd.py",
            ),
            (
                "summed",
                ["a share gets one psum over", "just the axes it lacks"],
                "cotangents/custom_vjp.py",
            ),
            (
                "placed",
                ["casts move to where their", "psums move fewest bytes"],
                "casts/placing.py",
            ),
        ],
    ),
    "path_of_a_proof": (
        "The proof of one collective",
        [
            ("read", ["HLO text to instructions,", "shapes, device groups"], "hlo/reader"),
            ("started", ["parameters start from", "their shardings"], "proof/inputs.py"),
            (
                "followed",
                ["each opcode refines what its", "operands are equal over"],
                "proof/handlers.py",
            ),
            ("looped", ["loops to a fixpoint; branches", "by their predicate"], "proof/control.py"),
            (
                "moved",
                ["a collective's result from", "its group's operands"],
                "proof/collectives.py",
            ),
            (
                "judged",
                ["is the operand equal within", "each group? with the cause"],
                "proof/verdict.py",
            ),
        ],
    ),
}


def text(x, y, what, size=13, colour=INK, weight=400):
    return (
        f'<text x="{x}" y="{y}" font-size="{size}" fill="{colour}" text-anchor="middle" '
        f'font-weight="{weight}">{escape(what)}</text>'
    )


def drawn(title, stops):
    """Draw two rows of three stops, with an arrow from each to the next."""
    width, height = 3 * WIDTH + 2 * GAP + 40, 2 * HEIGHT + GAP + 80
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="system-ui, sans-serif" role="img">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>',
        text(width / 2, 36, title, 16, weight=600),
    ]
    for number, (heading, lines, module) in enumerate(stops):
        x, y = 20 + number % 3 * (WIDTH + GAP), 58 + number // 3 * (HEIGHT + GAP)
        middle = x + WIDTH / 2
        parts.append(
            f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="6" fill="{FILL}" '
            f'stroke="{LINE}"/>'
        )
        parts.append(text(middle, y + 20, f"{number + 1}  {heading}", 14, weight=600))
        parts += [text(middle, y + 39 + 16 * row, line, 12) for row, line in enumerate(lines)]
        parts.append(text(middle, y + 76, module, 11, DIM))
        if number % 3 < 2:
            parts.append(arrow(f"M{x + WIDTH + 4} {y + HEIGHT / 2}h{GAP - 8}", "l-7 -5m7 5l-7 5"))
        elif number < len(stops) - 1:
            parts.append(
                arrow(
                    f"M{middle} {y + HEIGHT}v{GAP / 2}H{20 + WIDTH / 2}v{GAP / 2 - 2}",
                    "l-5 -7m5 7l5 -7",
                )
            )
    return "\n".join([*parts, "</svg>"]) + "\n"


def arrow(line, head):
    return f'<path d="{line}{head}" stroke="{DIM}" stroke-width="1.6" fill="none"/>'


def main():
    folder = pathlib.Path(__file__).parent
    for name, (title, stops) in PATHS.items():
        (folder / f"{name}.svg").write_text(drawn(title, stops))


if __name__ == "__main__":
    main()
