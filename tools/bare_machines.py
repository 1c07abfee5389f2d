"""Tries the wheel on bare machines: chroots of Debian with Python and without a compiler.

Root alone may, and needs debootstrap and iproute2. What is installed then runs without a network:
the first token, and an answer of the server on port 8080. Every step of deploy/Dockerfile is run
too. With qemu-user-static, the wheel of aarch64 is tried in a chroot of that machine.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).parents[1]
CHROOTS = ROOT / "build" / "chroots"
SUITES = "bookworm", "trixie"
DIST = ROOT / "dist"
DEBIAN = {"x86_64": "amd64", "aarch64": "arm64"}
EXTRAS = "[build,serve]"
CORTEX_A72 = """processor : 0
BogoMIPS : 108.00
Features : fp asimd evtstrm crc32 cpuid
CPU implementer : 0x41
CPU architecture: 8
CPU variant : 0x0
CPU part : 0xd08
CPU revision : 3

"""
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
TRUSTED = Path("/certificates.pem")
"""Where this machine's certificates lie in a chroot: what is installed there brings others."""

WAYS = {
    "pip": ("{python} -m venv /try && /try/bin/pip install -q '{wheel}'", "/try/bin/specrt"),
    "pipx": (
        "{python} -m venv /tools && /tools/bin/pip install -q pipx"
        " && /tools/bin/pipx install -q '{wheel}'",
        "/root/.local/bin/specrt",
    ),
    "uvx": (
        "{python} -m venv /tools && /tools/bin/pip install -q uv"
        " && /tools/bin/uvx -q --python {python} --from '{wheel}' specrt --version",
        "/tools/bin/uvx --offline -q --python {python} --from '{wheel}' specrt",
    ),
}  # fmt: skip
"""How each is installed, and what is typed then."""

GENERATE = "cd /root && {specrt} generate --prompt 'def fibonacci(n):' --max-tokens 16"
ASK = """python3 - <<'END'
import json, time, urllib.request
for _ in range(1200):
    try:
        served = json.load(urllib.request.urlopen("http://127.0.0.1:8080/v1/models"))
        break
    except OSError:
        time.sleep(0.1)
name = served["data"][0]["id"]
body = json.dumps({"model": name, "prompt": "def f(", "max_tokens": 4}).encode()
asked = urllib.request.Request(
    "http://127.0.0.1:8080/v1/completions", body, {"Content-Type": "application/json"}
)
answer = json.load(urllib.request.urlopen(asked))
print(answer["usage"]["completion_tokens"], "tokens of", name, "on 8080")
END
status=$?; kill $!; wait; exit $status
"""
ENVIRONMENT = (
    "env -i HOME=/root LANG=C.UTF-8 PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin "
    f"SSL_CERT_FILE={TRUSTED} PIP_CERT={TRUSTED}"
)
COMPILERS = "c++", "g++", "clang++", "cc", "gcc", "clang"


@dataclass(frozen=True)
class Chroot:
    """A bare machine of a Debian release, and an interpreter from elsewhere where one is named."""

    place: Path
    python: str = "python3"
    prefix: str = ""
    """Where the interpreter from elsewhere is, here and there."""

    user: str = "0"
    cpuinfo: Path | None = None
    """What an emulated processor says of itself; ONNX Runtime reads it when it starts."""

    def run(self, script: str, *, network: bool = True) -> str:
        """Run a script in it; return what it printed.

        Raises: CalledProcessError.
        """
        mounts = [f"mount -t proc proc {self.place}/proc"]
        if self.prefix:
            inside = Path(f"{self.place}{self.prefix}")
            inside.mkdir(parents=True, exist_ok=True)
            mounts.append(f"mount --bind -o ro {self.prefix} {inside}")
        if self.cpuinfo:
            mounts.append(f"mount --bind {self.cpuinfo} {self.place}/proc/cpuinfo")
        if not network:
            mounts.append("ip link set lo up")
        enter = f"exec {ENVIRONMENT} chroot --userspec={self.user} {self.place} sh -s"
        apart = ["unshare", "--mount", *([] if network else ["--net"])]
        done = subprocess.run(
            [*apart, "sh", "-ec", "; ".join([*mounts, enter])],
            input=script, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise SystemExit(f"{self.place.name}: {script}\n{done.stdout}{done.stderr}")
        return done.stdout

    def empty(self) -> None:
        """Remove what an earlier try left, but for what pip and uv have downloaded."""
        for name in ("try", "tools", "root/.local", "root/.cache/specrt"):
            shutil.rmtree(self.place / name, ignore_errors=True)


def main() -> int:
    """Make the chroots that are missing, try all ways there, and print a table."""
    print(f"{'machine':<18}{'Python':<8}{'way':<6}{'installed':>10}{'first token':>13}   served")
    for chroot, ways in machines(sys.argv[1:]):
        for way in ways:
            print(tried(chroot, way), flush=True)
    print(f"deploy/Dockerfile: {image()}")
    return 0


def machines(pythons: Sequence[str]) -> Iterator[tuple[Chroot, Sequence[str]]]:
    """Yield each bare machine, and the ways to try on it."""
    for suite in SUITES:
        place = bare(suite)
        yield Chroot(place), [*WAYS]
        if suite not in Path("/etc/os-release").read_text("utf-8"):
            continue  # what was compiled here needs the libraries of this release
        for python in pythons:
            find = "import sys; print(sys.base_prefix)"
            prefix = subprocess.check_output([python, "-c", find], text=True).strip()
            yield Chroot(place, f"{prefix}/bin/python3", prefix), ["pip"]
    if not Path("/proc/sys/fs/binfmt_misc/qemu-aarch64").exists():
        print("aarch64 was not tried: no qemu-user-static with binfmt runs its programs here")
        return
    cpuinfo = CHROOTS / "cpuinfo"
    cpuinfo.write_text(CORTEX_A72 * 2, "utf-8")
    yield Chroot(bare(SUITES[0], machine="aarch64"), cpuinfo=cpuinfo), ["pip"]


def bare(suite: str, packages: str = "python3,python3-venv", machine: str = "x86_64") -> Path:
    """Return the chroot of a release, made if it is missing."""
    place = CHROOTS / "-".join([suite, machine, *([] if packages else ["slim"])])
    made = place / ".made"
    if not made.exists():
        shutil.rmtree(place, ignore_errors=True)
        CHROOTS.mkdir(parents=True, exist_ok=True)
        command = ["debootstrap", f"--arch={DEBIAN[machine]}", "--variant=minbase"]
        command += [f"--include={packages}"] if packages else []
        done = subprocess.run(
            [*command, suite, str(place), mirror()], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(f"debootstrap of {suite} failed: {done.stdout[-2000:]}{done.stderr}")
        made.touch()
    for compiler in COMPILERS:
        if any((place / folder / compiler).exists() for folder in ("usr/bin", "usr/local/bin")):
            raise SystemExit(f"{place} has {compiler}, and should be bare; remove {place}")
    shutil.copyfile("/etc/resolv.conf", place / "etc/resolv.conf")
    shutil.copyfile(CERTIFICATES, place / TRUSTED.name)
    return place


def mirror() -> str:
    """Return the address of Debian's packages that this machine uses."""
    lists = [Path("/etc/apt/sources.list"), *Path("/etc/apt/sources.list.d").glob("*")]
    text = "\n".join(file.read_text("utf-8") for file in lists if file.is_file())
    found = re.search(r"^(?:URIs:|deb(?: \[.*\])?) *(\S+/debian)/?(?:\s|$)", text, re.MULTILINE)
    if found is None:
        raise SystemExit("apt's lists name no address that ends with /debian")
    return found[1]


def tried(chroot: Chroot, way: str) -> str:
    """Install the wheel one way, complete a prompt and serve; return the row of the table."""
    chroot.empty()
    machine = chroot.place.name.partition("-")[2]
    (wheel,) = DIST.glob(f"*_{machine}.whl")
    (chroot.place / "wheels").mkdir(exist_ok=True)
    shutil.copy(wheel, chroot.place / "wheels")
    words = {"python": chroot.python, "wheel": f"/wheels/{wheel.name}{EXTRAS}"}
    install, specrt = (part.format(**words) for part in WAYS[way])
    began = time.monotonic()
    chroot.run(install)
    installed_s = time.monotonic() - began
    chroot.run(GENERATE.format(specrt=specrt), network=False)
    token_s = time.monotonic() - began
    served = chroot.run(f"cd /root && {specrt} serve & {ASK}", network=False)
    version = chroot.run(
        f"{chroot.python} -c 'import sys; print(*sys.version_info[:2], sep=\".\")'"
    )
    return (f"{chroot.place.name:<18}{version.strip():<8}{way:<6}{installed_s:>8.1f} s"
            f"{token_s:>11.1f} s   {served.strip()}")  # fmt: skip


def image() -> str:
    """Run every step of the Dockerfile in chroots, and start what it starts, as its user."""
    stages: dict[str, Chroot] = {}
    settings = ""
    for verb, rest in steps():
        if verb == "FROM":
            base, _, name = rest.partition(" AS ")
            suite = base.removeprefix("debian:").removesuffix("-slim")
            stage = stages[name] = Chroot(CHROOTS / f"image-{name or 'last'}")
            shutil.rmtree(stage.place, ignore_errors=True)
            subprocess.run(["cp", "-a", bare(suite, packages=""), stage.place], check=True)
        elif verb == "RUN":
            stage.run(f"set -e\n{rest}")
        elif verb == "COPY":
            *options, source, target = rest.split()
            origin = stages[options[0].removeprefix("--from=")].place if options else ROOT
            inside = stage.place / target.lstrip("/")
            inside.parent.mkdir(parents=True, exist_ok=True)
            subprocess.run(["cp", "-a", origin / source.lstrip("/"), inside], check=True)
        elif verb == "ENV":
            settings += f"export {rest}\n"
        elif verb == "USER":
            stage = replace(stage, user=rest)
        elif verb == "ENTRYPOINT":
            return stage.run(f"{settings}{shlex.join(json.loads(rest))} & {ASK}", network=False)
        elif verb not in ("EXPOSE", "STOPSIGNAL", "HEALTHCHECK"):
            raise SystemExit(f"{verb} of deploy/Dockerfile is not known here")
    raise SystemExit("deploy/Dockerfile starts nothing")


def steps() -> Iterator[tuple[str, str]]:
    """Yield the instructions of the Dockerfile, and what each is given."""
    text = re.sub(
        r"^#.*\n", "", (ROOT / "deploy/Dockerfile").read_text("utf-8"), flags=re.MULTILINE
    )
    for line in text.replace("\\\n", " ").splitlines():
        verb, _, rest = line.partition(" ")
        if verb:
            yield verb, rest.strip()


if __name__ == "__main__":
    sys.exit(main())
