"""Subtitles of a transcription: SubRip and WebVTT."""

from __future__ import annotations

from collections.abc import Sequence

from specrt.speech.transcription import TranscriptionSegment


def srt_text(segments: Sequence[TranscriptionSegment]) -> str:
    """Return segments as SubRip has them: a number, a time and a text each."""
    cues = (f"{number}\n{_cue(segment, ',')}\n" for number, segment in enumerate(segments, 1))
    return "\n".join(cues)


def vtt_text(segments: Sequence[TranscriptionSegment]) -> str:
    """Return segments as WebVTT has them."""
    return "\n".join(["WEBVTT\n", *(f"{_cue(segment, '.')}\n" for segment in segments)])


def line_text(segment: TranscriptionSegment) -> str:
    """Return a segment in one line: its time and its text."""
    return f"[{_span(segment, '.')}] {_flat(segment.text)}"


def _flat(text: str) -> str:
    """Return a text in one line; an arrow in it would be read as a time."""
    return " ".join(text.split()).replace("-->", "->")


def _cue(segment: TranscriptionSegment, point: str) -> str:
    """Return the time and the text of a segment."""
    return f"{_span(segment, point)}\n{_flat(segment.text)}"


def _span(segment: TranscriptionSegment, point: str) -> str:
    return f"{_clock(segment.start, point)} --> {_clock(segment.end, point)}"


def _clock(seconds: float, point: str) -> str:
    whole, milliseconds = divmod(round(seconds * 1000), 1000)
    minutes, second = divmod(whole, 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour:02}:{minute:02}:{second:02}{point}{milliseconds:03}"
