"""All that one run found, as text, Markdown or JSON."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from specrt.bandwidth import Bandwidth
from specrt.bench.footprint import Footprint
from specrt.bench.report import Report, Task
from specrt.bench.setting import Setting
from specrt.bench.table import Table, round_table, speed_table
from specrt.bench.verdict import verdicts


@dataclass(frozen=True)
class Summary:
    """A report, what it holds for, and what memory had to do with it."""

    setting: Setting
    report: Report
    memory: Footprint
    bandwidth: Bandwidth

    @property
    def sentences(self) -> list[str]:
        """What was found, in words."""
        return [*verdicts(self.report), self._reading(), str(self.memory)]

    def _reading(self) -> str:
        """Hold plain decoding, which reads every weight for a token, to what memory can give."""
        read = self.report.total.plain.weights_per_second.median
        share = read / self.bandwidth.bytes_per_second
        inside = "; more than memory gives, so weights stay in the cache" if share > 1 else ""
        return (
            f"plain decoding reads {read / 1e9:.1f} GB/s of weights in the target's passes, "
            f"{share:.0%} of {self.bandwidth}{inside}"
        )

    def to_text(self) -> str:
        """Return tables and sentences for a terminal."""
        tables = (table.to_text() for table in self._tables(str))
        return "\n\n".join([str(self.setting), *tables, "\n".join(self.sentences)])

    def to_markdown(self) -> str:
        """Return tables and sentences for a README."""
        tables = (table.to_markdown() for table in self._tables(lambda name: f"**{name}**"))
        said = "\n".join(f"- {sentence}" for sentence in self.sentences)
        return "\n\n".join([str(self.setting), *tables, said])

    def _tables(self, title: Callable[[str], str]) -> list[Table]:
        speeds = [speed_table(t, f"{title(t.category)}, {_prompts(t)}") for t in self.report.tasks]
        total = self.report.total
        rounds = f"{title('a round')}, {_prompts(total)}: where its time goes"
        return [*speeds, round_table(total, rounds)]

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain JSON types."""
        return {
            **self.setting.to_json(),
            **self.report.to_json(),
            "memory": self.memory.to_json(),
            "bandwidth": self.bandwidth.to_json(),
            "verdict": self.sentences,
        }


def _prompts(task: Task) -> str:
    return f"{task.prompts} prompt{'s' if task.prompts > 1 else ''}"
