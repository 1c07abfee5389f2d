"""Rehearse ort-cuda bundles without a GPU: the real CUDA provider over a device that does nothing.

    python benchmarks/gpu/gpucheck/provider.py BUNDLE [BUNDLE ...]

Where onnxruntime-gpu is installed and nothing else of CUDA is needed: this builds stand-ins for
the CUDA libraries (`../idle/`), in which memory is the host's and kernels do nothing. The provider
then assigns nodes, checks inputs, copies, captures and replays as on a GPU. What is held:
the session opens with no node on the CPU, each captured width is captured once and replayed ever
after, and nothing is copied to or from the host, or waited for, inside a capture.
What is not: any number, any time, any kernel. Prints one JSON object a model. Needs gcc and
binutils.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

IDLE = Path(__file__).parents[1] / "idle"
CUDA = "ort-cuda"
ROUNDS = 3


def main() -> int:
    """Rehearse the bundles named, or one model in a process of its own."""
    if sys.argv[1:2] == ["--model"]:
        _run(Path(sys.argv[2]), sys.argv[3])
        return 0
    with tempfile.TemporaryDirectory() as folder:
        libraries = _build(Path(folder))
        found = [_rehearse(Path(b), role, libraries) for b in sys.argv[1:] for role in _roles(b)]
    for one in found:
        print(json.dumps(one))
    return 0 if found and all(one["ok"] for one in found) else 1


def _roles(bundle: str) -> list[str]:
    from specrt.bundle import read_manifest

    manifest = read_manifest(Path(bundle))
    models = {"target": manifest.target, "draft": manifest.draft}
    return [role for role, m in models.items() if m and manifest.backend_of(m) == CUDA]


def _rehearse(bundle: Path, role: str, libraries: Path) -> dict[str, object]:
    """Run one model's passes in a process that finds the stand-ins first."""
    report = libraries / "report.json"
    report.unlink(missing_ok=True)
    there = os.environ.get("LD_LIBRARY_PATH")
    paths = [str(libraries), *([there] if there else [])]
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": ":".join(paths),
        "IDLE_REPORT": str(report),
    }
    command = [sys.executable, __file__, "--model", str(bundle), role]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    said = done.stdout.strip().splitlines() or done.stderr.strip().splitlines() or [""]
    made = {"bundle": bundle.name, "model": role}
    if done.returncode or not report.exists():
        return {**made, "ok": False, "error": said[-1]}
    counted, ran = json.loads(report.read_text()), json.loads(said[-1])
    clean = not counted["copies_in_captures"] and not counted["waits_in_captures"]
    once = counted["captures"] == ran["captured"]
    # The first run of a width captures it and replays it; each later one replays it.
    replayed = counted["replays"] == ran["captured"] * ROUNDS
    return {**made, "ok": clean and once and replayed, **ran, **counted}


def _run(bundle: Path, role: str) -> None:
    """Run every captured width some times, a prefill in between."""
    import numpy as np
    import onnxruntime

    from specrt.bundle import read_manifest
    from specrt.engine.ort_cuda import OrtCudaEngine

    del onnxruntime.preload_dlls  # it would load NVIDIA's own libraries where they are installed
    manifest = read_manifest(bundle)
    model = getattr(manifest, role)
    engine = OrtCudaEngine(
        bundle / model.engine, model.geometry, batch=1, max_length=manifest.max_length,
        max_width=manifest.max_width,
    )  # fmt: skip
    widths = [gamma + 1 for gamma in manifest.gammas]
    for turn in range(ROUNDS):
        for width in (manifest.prefill, *widths):
            rows = 1 if width == manifest.prefill else width
            engine.forward(np.zeros((1, width), np.int64), turn, rows).logits.sum()
    providers = engine._session.get_providers()
    engine.close()
    print(json.dumps({"providers": providers, "captured": len(widths)}))


def _build(folder: Path) -> Path:
    """Compile a stand-in for each CUDA library that the provider is linked to."""
    import onnxruntime

    place = Path(onnxruntime.__file__).parent / "capi" / "libonnxruntime_providers_cuda.so"
    if not place.exists():
        raise SystemExit(
            "onnxruntime here has no CUDA provider: `pip uninstall onnxruntime`, then "
            "`pip install onnxruntime-gpu`; both packages are one module"
        )
    wanted: dict[str, set[str]] = {"libcuda.so.1": set()}
    listed = subprocess.run(
        ["nm", "-D", "--undefined-only", str(place)], capture_output=True, text=True, check=True
    )
    for line in listed.stdout.splitlines():
        name, _, library = line.split()[-1].partition("@")
        if library.startswith(("libcu", "libnv")):
            wanted.setdefault(library, set()).add(name)
        elif name.startswith("cu") and name[2:3].isupper():
            wanted["libcuda.so.1"].add(name)
    needed = subprocess.run(
        ["readelf", "-d", str(place)], capture_output=True, text=True, check=True
    )
    for line in needed.stdout.splitlines():
        if "(NEEDED)" in line and "[libcu" in line:
            wanted.setdefault(line.partition("[")[2].rstrip("]"), set())
    for library, names in wanted.items():
        _compile(folder, library, names)
    return folder


def _compile(folder: Path, library: str, names: set[str]) -> None:
    source = IDLE / f"{library.removeprefix('lib').partition('.')[0]}.c"
    written = source.read_text() if source.exists() else ""
    rest = [name for name in sorted(names) if f"{name}(" not in written]
    (folder / "rest.c").write_text("".join(f"int {name}(void) {{ return 0; }}\n" for name in rest))
    (folder / "map").write_text(f"{library} {{ global: *; }};\n")
    versions = [] if library == "libcuda.so.1" else [f"-Wl,--version-script={folder / 'map'}"]
    sources = [str(folder / "rest.c"), *([str(source)] if written else [])]
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-O1", "-w", f"-Wl,-soname,{library}", *versions,
         "-o", str(folder / library), *sources],
        check=True,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
