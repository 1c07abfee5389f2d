"""Measure what speculation gains here, against plain decoding in the same process.

Two regimes hide in one number. Prefill handles many tokens a pass and is bound by arithmetic; it
decides the time to first token. Decode reads every weight for each pass and is bound by memory;
it decides tokens per second, and it is what speculation shortens. Both are reported apart.

A machine's speed drifts within minutes. So every prompt runs at every configuration back to back,
and a speedup is the ratio of two completions of one prompt that ran seconds apart; the figure is
the median of these ratios, with their quartiles. Outputs are compared before any figure is given.
"""
