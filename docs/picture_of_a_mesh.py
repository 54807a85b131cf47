"""Write defensive_psum.svg: one backward pass on a mesh of 4 x 2 devices, check off and on.

python docs/picture_of_a_mesh.py
"""

import pathlib

INK, DIM, LINE, SENT = "#1d2129", "#565e6a", "#c3cad3", "#b5352c"
FILLS = ("#cfe3f5", "#fbdcb4", "#d5ecc9", "#f3cfe0")


def text(x, y, what, size=13, colour=INK, anchor="middle", weight=400):
    return (
        f'<text x="{x}" y="{y}" font-size="{size}" fill="{colour}" text-anchor="{anchor}" '
        f'font-weight="{weight}">{what}</text>'
    )


def mesh(left, title, psum):
    """Draw four rows of two devices, each with the gradient that it holds."""
    parts = [text(left + 140, 34, title, 16, weight=600)]
    parts.append(text(left + 140, 56, "gradients in the backward pass", colour=DIM))
    parts += [text(left + 60 + 160 * c, 84, f"model {c}", colour=DIM) for c in range(2)]
    for row, fill in enumerate(FILLS):
        y = 96 + 58 * row
        for column in range(2):
            x = left + 160 * column
            parts.append(
                f'<rect x="{x}" y="{y}" width="120" height="44" rx="6" fill="{fill}" '
                f'stroke="{LINE}"/>' + text(x + 60, y + 27, f"g{row}", 15)
            )
        if psum:
            y += 22
            parts.append(
                f'<path d="M{left + 124} {y}H{left + 156}M{left + 131} {y - 5}l-7 5l7 5'
                f'M{left + 149} {y - 5}l7 5l-7 5" stroke="{SENT}" stroke-width="2" fill="none"/>'
            )
        if left < 200:
            parts.append(
                text(left - 12, 96 + 58 * row + 27, f"data {row}", colour=DIM, anchor="end")
            )
    return parts


def main():
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 400" width="760" height="400" '
        'font-family="system-ui, sans-serif" role="img">',
        "<title>A defensive psum</title>",
        '<rect width="760" height="400" rx="8" fill="#ffffff"/>',
        *mesh(90, "check_vma=False", psum=True),
        *mesh(450, "check_vma=True", psum=False),
        text(230, 352, "psum over model: (g/2) + (g/2) = g", 14, SENT),
        text(230, 374, "all bytes are sent, and nothing changes", colour=DIM),
        text(590, 352, "nothing is sent: both hold g already", 14),
        text(590, 374, "where devices do differ, the psum stays", colour=DIM),
        "</svg>",
    ]
    pathlib.Path(__file__).with_name("defensive_psum.svg").write_text("\n".join(parts) + "\n")


if __name__ == "__main__":
    main()
