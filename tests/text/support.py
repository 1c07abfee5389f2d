"""What tests of text share."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from tokenizers import Tokenizer as HubTokenizer

from specrt.text.tokenizer import Tokenizer

held = settings(
    max_examples=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def hub(tokenizer: Tokenizer) -> HubTokenizer:
    return HubTokenizer.from_str(tokenizer.to_json())
