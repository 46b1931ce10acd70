"""Options that nothing passes do not come back: an option enters when a lesson, a lab or a documented use passes it."""

import options as declared
import pytest

BAR = 60


@pytest.mark.timeout(400)  # it reads all of the project: 12 s of a processor
def test_few_options_are_passed_by_nothing():
    never = declared.never_passed()
    texts, allowed = {one.text for one in never}, declared.allowed()
    gone = sorted(set(allowed) - texts)
    assert not gone, f"passed by now, or gone: take them out of {declared.ALLOWED.name}: {gone}"
    counted = sorted(texts - set(allowed))
    assert len(counted) <= BAR, f"{len(counted)} options that nothing passes (at most {BAR}): " + ", ".join(counted)
