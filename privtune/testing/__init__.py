"""Contract suites that PrivTune ships with its abstractions. Needs pytest.

Whoever writes another storage, strategy or executor runs these against it.
"""
