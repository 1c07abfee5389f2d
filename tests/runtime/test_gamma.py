from specrt.speculation.gamma import DraftDecision, FixedGamma, GammaPolicy
from specrt.speculation.round import Round


def test_a_fixed_gamma_stays_whatever_comes() -> None:
    policy: GammaPolicy = FixedGamma(4)
    for accepted in (0, 0, 0, 4):
        assert policy.choose() == 4
        assert [policy.decide(place, 0.01) for place in (1, 2, 3, 4)] == [
            DraftDecision.CONTINUE
        ] * 4
        policy.observe(Round([1] * (accepted + 1), 4, accepted, 10, 10))
    assert policy.choose() == 4


def test_fixed_at_nothing_is_plain() -> None:
    assert FixedGamma(0).choose() == 0
