"""Take the pictures of the report's page: train.py for TPU with 2 and with 24 layers, in Chromium.

python docs/pictures.py      needs the extra `libraries`, libtpu, and chromium (a Debian package)
"""

import os
import pathlib
import re
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).parent
# Layers, pixels down.
PICTURES = {"report_top": (2, 560), "report_30": (2, 1400), "report_300": (24, 1750)}
CHROMIUM = (
    "chromium --headless --no-sandbox --disable-gpu --disable-quic --no-first-run "
    "--disable-background-networking --disable-component-update --disable-sync --hide-scrollbars"
).split()


def run(*arguments):
    """Run this Python in the folder of train.py, whose source lines the page quotes."""
    env = os.environ | {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    subprocess.run([sys.executable, *arguments], cwd=HERE, env=env, check=True)


def main():
    with tempfile.TemporaryDirectory() as folder:
        for name, (layers, height) in PICTURES.items():
            hlo, page = pathlib.Path(folder, "train.hlo"), pathlib.Path(folder, f"{name}.html")
            run("train.py", "--compile-for=tpu", f"--layers={layers}", f"--hlo={hlo}")
            text = hlo.read_text().replace(f"{HERE.resolve()}/", "")  # paths as seen from here
            hlo.write_text(re.sub(r"[^\s\"'(]*/site-packages/", "", text))
            mesh = "--mesh=data=4,model=2"
            run("-m", "shardrules", "report", str(hlo), mesh, "--format=html", f"--output={page}")
            subprocess.run(
                [
                    *CHROMIUM,
                    f"--user-data-dir={folder}/chromium",
                    f"--window-size=1280,{height}",
                    f"--screenshot={HERE / name}.png",
                    f"file://{page}",
                ],
                check=True,
                capture_output=True,
            )
            print(f"{name}.png: {(HERE / name).with_suffix('.png').stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
