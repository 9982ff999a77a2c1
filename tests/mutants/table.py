"""The mistakes: where, what is written instead, which tests must find it, and what it would break."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Mutant:
    """One mistake.

    Attributes:
        file: The file, from the root of the repository.
        old: The text that is there exactly once.
        new: What is put in its place.
        tests: What must find it: files or tests, as pytest names them.
        why: What would be broken.
    """

    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    why: str


MUTANTS: list[Mutant] = []


def _in(file: str, *rows: tuple[str, str, str, str]) -> None:
    """Add the mutants of a file: (why, old, new, tests apart by blanks)."""
    for why, old, new, tests in rows:
        MUTANTS.append(Mutant(f"privtune/{file}", old, new, tuple(tests.split()), why))


_RANDOM = "tests/training/mechanism/test_randomness.py"
_SCORING = "tests/training/mechanism/test_scoring.py"
_METRICS = "tests/training/mechanism/test_metrics.py"
_TAILS = "tests/training/mechanism/test_tails.py"
_UNUSABLE = "tests/training/mechanism/test_unusable.py"
_ORACLE = "tests/training/mechanism/test_oracle.py"
_NOISE = "tests/training/methods/test_noise.py"
_CONTRACT = "tests/training/methods/test_contract.py"
_ENGINE = "tests/training/engine/test_engine.py"
_NORMS = "tests/training/engine/test_extreme_norms.py"
_PATHS = "tests/training/engine/test_paths.py"
_DEVICE = "tests/training/engine/test_device.py"
_RULES = "tests/training/engine/test_rules.py"
_RECORD = "tests/training/engine/test_record.py"
_NEIGHBOURS = "tests/training/engine/test_neighbours.py"
_CANDIDATES = "tests/training/engine/test_candidates.py"
_SENSITIVITY = f"{_NOISE}::test_one_record_moves_no_sum_by_more_than_its_sensitivity"
_TRANSCRIPT = f"{_CONTRACT}::test_transcript_equals_the_event_exactly"
_FACTS = f"{_UNUSABLE}::test_whatever_is_wrong_with_a_record_no_release_changes_by_a_bit"

_in(
    "training/mechanism/clipping.py",
    (
        "twice the bound is clipped to",
        "(limits / norms).clamp_(max=1.0)",
        "(2.0 * limits / norms).clamp_(max=1.0)",
        _SENSITIVITY,
    ),
    (
        "a gradient that is no number is not clipped",
        ".masked_fill_(~norms.isfinite(), 0.0)",
        ".masked_fill_(~norms.isfinite(), 1.0)",
        f"{_ORACLE}::test_a_norm_that_is_no_number_counts_nothing",
    ),
    (
        "automatic clipping states half its sensitivity",
        '_column("max_grad_norm", 1.0, candidates)',
        '_column("max_grad_norm", 0.5, candidates)',
        f"{_ORACLE}::test_a_norm_that_is_no_number_counts_nothing",
    ),
    (
        "automatic clipping multiplies by its stabilizer",
        "(norms + limits).reciprocal_()",
        "(norms * limits).reciprocal_()",
        f"{_ORACLE}::test_a_norm_that_is_no_number_counts_nothing",
    ),
    (
        "every layer is clipped to the bound of the whole",
        "/ math.sqrt(norms.shape[0])",
        "/ 1.0",
        "tests/strategies/test_methods_in_arms.py"
        "::test_clipping_by_layer_is_clipping_of_the_same_sensitivity",
    ),
    (
        "transformed gradients are clipped to twice what is stated",
        'for every candidate, shape ``[K, 1]``."""\n        return _as_rows',
        'for every candidate, shape ``[K, 1]``."""\n        return 2 * _as_rows',
        _SENSITIVITY,
    ),
    (
        "a bound that was written over is remembered",
        "(known[0] is value and known[1] == version)",
        "known[0] is value",
        f"{_ORACLE}::test_a_bound_that_is_written_over_is_read_anew",
    ),
    (
        "a bound that nobody looked at hides all, without noise",
        "column.masked_fill(~(column >= _SMALLEST), math.nan)",
        "column.masked_fill(~(column >= _SMALLEST), 0.0)",
        f"{_DEVICE}::test_a_bound_that_is_none_is_no_number_where_nobody_looks",
    ),
    (
        "a bound that float32 cannot see is taken",
        "_SMALLEST = 1e-15",
        "_SMALLEST = 0.0",
        f"{_NORMS}::test_a_bound_that_float32_does_not_see_is_refused",
    ),
)

_in(
    "training/mechanism/noise.py",
    (
        "noise does not know the sensitivity",
        "multipliers * sensitivity, 0.0)",
        "multipliers, 0.0)",
        f"{_RANDOM}::test_noise_scale_is_multiplier_times_sensitivity",
    ),
    (
        "half the noise",
        "multipliers * sensitivity, 0.0)",
        "0.5 * multipliers * sensitivity, 0.0)",
        f"{_ORACLE}::test_every_release_has_its_noise",
    ),
    (
        "tails that nobody looked at are the generator's own",
        "torch.where(found.abs() > EDGE, own, found)",
        "found",
        f"{_TAILS}::test_tails_keep_signs_and_all_else",
    ),
    (
        "a negative multiplier is taken",
        "and multiplier >= 0.0 for",
        "and multiplier >= -9.0 for",
        f"{_RANDOM}::test_noise_scale_is_multiplier_times_sensitivity",
    ),
    (
        "noise on what has no finite sensitivity",
        "if not all(m == 0.0 or math.isfinite(bound) for m, bound in zip(own, bounds, strict=True)):",
        "if False:",
        f"{_RANDOM}::test_noise_scale_is_multiplier_times_sensitivity",
    ),
    (
        "losses get half the noise",
        "return torch.addcmul(total, noise, column)",
        "return torch.addcmul(total, noise, column, value=0.5)",
        f"{_ORACLE}::test_every_release_has_its_noise",
    ),
    (
        "half the noise on the grid",
        "exact = total.double() + noise * column",
        "exact = total.double() + 0.5 * noise * column",
        f"{_ORACLE}::test_every_release_has_its_noise",
    ),
    (
        "the grid rounds nothing",
        "torch.where(column > 0.0, rounded, exact)",
        "exact",
        f"{_RANDOM}::test_the_grid_hides_the_lowest_bits",
    ),
    (
        "noise is given out twice",
        "return self._ahead[key].pop()",
        "return self._ahead[key][-1]",
        f"{_RANDOM}::test_candidates_and_steps_are_independent",
    ),
    (
        "Gaussian and Laplace noise are of one stream",
        'f"noise/{kind}/{size}"',
        'f"noise/{size}"',
        f"{_ORACLE}::test_no_two_sources_of_noise_have_one_key",
    ),
    (
        "all candidates have the same noise",
        "[_Keystream(s, name) for s in self._streams]",
        "[_Keystream(self._streams[0], name) for s in self._streams]",
        f"{_RANDOM}::test_candidates_and_steps_are_independent",
    ),
    (
        "what lies beyond the edge stays as float32 drew it",
        "part[place] = math.copysign(source.beyond(), part[place])",
        "source.beyond()",
        _TAILS,
    ),
    (
        "every key of the cipher is the first",
        "self._keys += 1",
        "self._keys += 0",
        f"{_ORACLE}::test_no_two_sources_of_noise_have_one_key",
    ),
    (
        "the cipher's uniform numbers end at a half",
        "np.uint64(11)",
        "np.uint64(12)",
        f"{_RANDOM}::test_gaussian_noise_is_standard_normal",
    ),
    (
        "the noise of float32 lies in half of its directions",
        "angle *= np.float32(math.pi * 2.0**-31)",
        "angle *= np.float32(math.pi * 2.0**-32)",
        f"{_RANDOM}::test_gaussian_noise_is_standard_normal",
    ),
    (
        "the noise of float32 is 2% too small",
        "radius *= np.float32(-2.0)",
        "radius *= np.float32(-1.92)",
        f"{_TAILS}::test_float32_noise_is_right_up_to_the_edge",
    ),
    (
        "the least word has no logarithm",
        "radius += np.float32(0.5)",
        "radius += np.float32(0.0)",
        f"{_TAILS}::test_no_word_gives_what_is_no_number",
    ),
    (
        "the keystream is given out twice after a checkpoint",
        "self._rekey(block=used // 64)",
        "self._rekey()",
        f"{_RANDOM}::test_noise_goes_on_where_it_was",
    ),
)

_in(
    "training/mechanism/noise.py",
    (
        "half as many tails as may be needed",
        "    return count\n",
        "    return count // 2\n",
        f"{_TAILS}::test_more_tails_are_sent_than_are_ever_needed",
    ),
    (
        "noise ends where the generator of float32 ends",
        "EDGE = 4.5\n",
        "EDGE = 6.0\n",
        _TAILS,
    ),
    (
        "fine numbers are as coarse as any",
        "_WORDS = 16 ",
        "_WORDS = 1 ",
        _TAILS,
    ),
    (
        "tails begin further out than they are cut",
        "_fine(uniform, size) * special.ndtr(-EDGE))",
        "_fine(uniform, size) * special.ndtr(-EDGE - 0.5))",
        _TAILS,
    ),
    (
        "noise of scores has one sign",
        "uniform(len(values)) < 0.5",
        "uniform(len(values)) < 0.0",
        _TAILS,
    ),
    (
        "negative tails are not drawn again",
        "max(values.max(), -values.min()) <= EDGE",
        "values.max() <= EDGE",
        _TAILS,
    ),
    (
        "half the Laplace noise on scores",
        "-np.log(_fine(uniform, size))",
        "-0.5 * np.log(_fine(uniform, size))",
        _TAILS,
    ),
)

_in(
    "training/mechanism/streams.py",
    (
        "candidates share a stream",
        "str(int(candidate)).encode()",
        'b"0"',
        f"{_RANDOM}::test_streams_differ_by_name_candidate_and_secret",
    ),
    (
        "purposes share a stream",
        "(_DOMAIN, name.encode(), ",
        '(_DOMAIN, b"", ',
        f"{_RANDOM}::test_streams_differ_by_name_candidate_and_secret",
    ),
    (
        "names run into numbers",
        'b"\\0".join',
        'b"".join',
        f"{_RANDOM}::test_streams_differ_by_name_candidate_and_secret",
    ),
    (
        "a generator holds 32 bits of its key",
        "hashlib.shake_256(key)",
        "hashlib.shake_256(key[:4])",
        f"{_ORACLE}::test_a_source_holds_the_whole_key",
    ),
    (
        "numpy's generator holds 32 bits of its key",
        "int.from_bytes(self.key(name, candidate))))",
        "int.from_bytes(self.key(name, candidate)[:4])))",
        f"{_ORACLE}::test_a_source_holds_the_whole_key",
    ),
    (
        "a fresh secret is a known one",
        "secret = secrets.token_bytes(32)",
        "secret = bytes(32)",
        f"{_RANDOM}::test_streams_differ_by_name_candidate_and_secret",
    ),
)

_in(
    "training/mechanism/sampling.py",
    (
        "records join a sample twice",
        "/ scale) + 1.0",
        "/ scale)",
        f"{_RANDOM}::test_inclusions_are_independent_bernoulli",
    ),
    (
        "more records join than the rate says",
        "scale = -math.log1p(-rate) if",
        "scale = -1.2 * math.log1p(-rate) if",
        f"{_RANDOM}::test_inclusions_are_independent_bernoulli",
    ),
    (
        "all candidates draw from one source",
        "_successes(line, self._rate, rng) for rng in self._rngs",
        "_successes(line, self._rate, self._rngs[0]) for rng in self._rngs",
        f"{_RANDOM}::test_samples_do_not_depend_on_the_stack",
    ),
)

_in(
    "training/mechanism/oracle.py",
    (
        "means are divided by the realised size",
        "return sample.rate * self.schedule.records",
        "return max(1.0, float(sample.sizes.max()))",
        f"{_ORACLE}::test_a_mean_is_over_the_expected_size",
    ),
    (
        "half the noise on the count of records not clipped",
        "torch.full((self.candidates,), 0.5,",
        "torch.full((self.candidates,), 0.25,",
        f"{_ORACLE}::test_every_release_has_its_noise",
    ),
    (
        "releases are missing in the transcript",
        "self._log.record(sample.number, kind, known[1])",
        "known[1]",
        f"{_ORACLE}::test_a_full_batch_is_no_sample",
    ),
    (
        "the noise of another sensitivity is remembered",
        "if k[0] is sensitivity and k[1] == own",
        "if k[1] == own",
        f"{_ORACLE}::test_every_release_has_its_noise",
    ),
    (
        "the transcript claims twice the noise",
        "own = float(noise_multiplier)",
        "own = 2.0 * float(noise_multiplier)",
        f"{_ORACLE}::test_a_full_batch_is_no_sample",
    ),
    (
        "half the noise on gradients",
        "noise.mul_(scale.unsqueeze(1))",
        "noise.mul_(0.5 * scale.unsqueeze(1))",
        f"{_ORACLE}::test_every_release_has_its_noise",
    ),
    (
        "no noise on the grid",
        "out = add_noise(out, noise, scale, self._noise.options)",
        "out = out.clone()",
        f"{_ORACLE}::test_every_release_has_its_noise",
    ),
    (
        "a record that breaks public facts counts",
        "mask = mask * ~unusable.view(index.shape)",
        "mask = mask * 1",
        _FACTS,
    ),
    (
        "what stands in for a record that raises counts",
        "y=own[1], mask=rows.mask * kept)",
        "y=own[1], mask=rows.mask)",
        _FACTS,
    ),
    (
        "what is released of a narrow net beside its weights has no noise",
        "out.masked_fill_(self._noise.outside, 0.0)",
        "pass",
        f"{_CANDIDATES}::test_beside_the_places_of_a_candidate_nothing_is_released",
    ),
    (
        "data of another size than the schedule's",
        "if len(data) != schedule.records and not data.sealed_size:",
        "if False:",
        f"{_ENGINE}::test_data_must_have_the_size_of_the_schedule",
    ),
    (
        "a full batch is written down as a sample",
        "return self._open(1.0, index, mask,",
        "return self._open(self.schedule.sample_rate, index, mask,",
        f"{_ORACLE}::test_a_full_batch_is_no_sample",
    ),
    (
        "losses are not clipped from above",
        "values.clamp_(min=0.0).minimum(limit)",
        "values.clamp_(min=0.0)",
        f"{_ORACLE}::test_a_loss_counts_from_zero_to_its_bound",
    ),
    (
        "losses are not clipped from below",
        "values.clamp_(min=0.0).minimum(limit)",
        "values.minimum(limit)",
        f"{_ORACLE}::test_a_loss_counts_from_zero_to_its_bound",
    ),
    (
        "a loss that is no number counts",
        "values.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)",
        "values",
        f"{_ORACLE}::test_a_loss_counts_from_zero_to_its_bound",
    ),
)

_in(
    "training/mechanism/transcript.py",
    (
        "one release more than charged passes",
        "if count > charged.get(look, 0):",
        "if count > charged.get(look, 0) + 1:",
        f"{_CONTRACT}::test_early_stop_is_within_and_one_step_more_is_not",
    ),
    (
        "releases that were not made pass",
        "else looks_of(event) - self.looks()",
        "else Counter()",
        f"{_ORACLE}::test_what_was_charged_and_not_released_is_missed",
    ),
    (
        "a candidate gets another's transcript",
        "own[k] if isinstance(own, tuple)",
        "own[0] if isinstance(own, tuple)",
        f"{_ORACLE}::test_a_candidate_is_the_same_alone_as_in_a_stack",
    ),
)

_in(
    "training/mechanism/metrics.py",
    (
        "losses of a score are not clipped",
        "values.clamp(least, most).unsqueeze(-1)",
        "values.unsqueeze(-1)",
        f"{_METRICS}::test_no_record_adds_more_than_the_norm_and_one_reaches_it",
    ),
)

_in(
    "training/mechanism/scoring.py",
    (
        "half the noise on scores",
        "len(sums)) * plan.standard_deviation",
        "len(sums)) * 0.5 * plan.standard_deviation",
        f"{_SCORING}::test_the_noise_has_the_charged_deviation",
    ),
    (
        "what a record adds to a score is held to no bound",
        "parts * (plan.bound / lengths.clamp(min=plan.bound))",
        "parts",
        f"{_METRICS}::test_whatever_a_metric_says_a_record_adds_its_bound_at_most",
    ),
    (
        "a score is divided by the size of the split",
        "sums / plan.records",
        "sums / len(data)",
        f"{_SCORING}::test_the_sum_is_divided_by_what_was_declared",
    ),
    (
        "a record that breaks public facts counts in a score",
        "found = found.masked_fill(unusable.unsqueeze(1), 0.0)",
        "pass",
        f"{_SCORING}::test_a_record_that_cannot_be_used_adds_exactly_nothing",
    ),
    (
        "a record leaves traces for the next in a model that is scored",
        "copied, _ = fresh(model)",
        "copied = model",
        f"{_SCORING}::test_a_model_that_mixes_records_mixes_nothing"
        f" {_SCORING}::test_a_model_is_left_as_it_was",
    ),
    (
        "Laplace scores get Gaussian noise",
        'noises.exact_gaussian if plan.mechanism == "gaussian" else noises.exact_laplace',
        "noises.exact_gaussian",
        f"{_SCORING}::test_the_noise_is_the_stream_s_next_draw_times_the_charged_scale",
    ),
)

_in(
    "training/mechanism/data.py",
    (
        "a record must break two facts to be refused",
        "torch.stack(broken).any(dim=0)",
        "torch.stack(broken).all(dim=0)",
        f"{_UNUSABLE}::test_facts_are_what_a_record_is_looked_up_in_as_it_stands",
    ),
    (
        "negative numbers pass as classes",
        "((values < 0) | (values >= sizes))",
        "(values >= sizes)",
        _UNUSABLE,
    ),
    (
        "a program's mistake is blamed on records",
        "if not blames_records(error) or raises(0, 0):",
        "if not blames_records(error):",
        f"{_UNUSABLE}::test_what_made_up_records_raise_too_is_no_records_fault",
    ),
)

_in(
    "training/mechanism/data.py",
    (
        "what cannot be used is fetched",
        "if unusable is None or not bool(unusable.any()):",
        "if True:",
        f"{_UNUSABLE}::test_in_memory_zeros_are_put_in_place_once",
    ),
)

_in(
    "training/mechanism/kernel.py",
    (
        "a mean over the batch is taken for losses of records",
        "if losses.shape != x.shape[:1]:",
        "if losses.ndim > 1:",
        f"{_PATHS}::test_losses_that_couple_records_are_refused",
    ),
)

_in(
    "study/rounds.py",
    (
        "all trainings that a strategy names share their noise",
        'streams.key(f"training/{_hash(self.request)}")',
        'streams.key("training/")',
        "tests/study/test_failures.py::test_the_trainings_of_an_arm_have_noise_of_their_own",
    ),
)

_in(
    "study/trial.py",
    (
        "a sealed trial tells its position",
        'streams.seed("number") % _NUMBERS if sealed else number',
        "number",
        "tests/study/test_optimize.py::test_the_number_of_a_sealed_trial_is_a_draw_of_its_own",
    ),
)

_in(
    "study/lifecycle.py",
    (
        "an error of PrivTune's own leaves a charged arm",
        "        except WITHOUT_DATA:",
        "        except PrivTuneError:",
        "tests/study/test_failures.py::test_every_exception_is_the_same_sentence",
    ),
)

_in(
    "spaces.py",
    (
        "what no file can hold is suggested",
        '    kind = str(getattr(value, "__qualname__", None) or type(value).__qualname__)',
        '    return value\n    kind = str(getattr(value, "__qualname__", None) or type(value).__qualname__)',
        "tests/study/test_choices.py::test_what_no_file_can_hold_is_refused_before_the_charge",
    ),
)

_SEAL = "tests/study/test_seal.py"
_SEALED = "tests/tracking/test_sealed.py::test_a_sealed_objective_cannot_log"
_TALK = f"{_SEAL}::test_what_a_sealed_function_prints_goes_to_the_curators_log"
_LATE = f"{_SEAL}::test_mlflow_that_is_imported_inside_is_sealed_too"
_NEST = f"{_SEAL}::test_seals_nest_and_open_with_the_last_even_after_an_error"

_in(
    "study/seal.py",
    (
        "a run that is active goes on around a round",
        "            _refuse_listeners()\n",
        "",
        "tests/study/test_optimize.py::test_the_users_own_logging_is_stopped",
    ),
    (
        "autologging goes on around a round",
        'options.get("disable") is False',
        'options.get("disable") is None',
        "tests/study/test_optimize.py::test_the_users_own_logging_is_stopped",
    ),
    (
        "MLflow is open inside a round",
        "                _close_mlflow()\n",
        "",
        _SEALED,
    ),
    (
        "MLflow that is imported inside is open",
        "sys.meta_path.insert(0, watch)",
        "sys.meta_path.append(watch)",
        _LATE,
    ),
    (
        "artifacts can be logged inside a round",
        '("TrackingServiceClient", "_get_artifact_repo")',
        '("TrackingServiceClient", "store")',
        _SEALED,
    ),
    (
        "what is printed inside is shown",
        "                _redirect(log)\n",
        "",
        _TALK,
    ),
    (
        "what C prints to its error stream is shown",
        "for descriptor in (1, 2):",
        "for descriptor in (1,):",
        _TALK,
    ),
    (
        "what a sealed round has left may speak after it",
        "                left = _started.end()",
        "                _started.end()",
        "tests/study/test_left_behind.py::test_what_is_left_is_refused_by_name",
    ),
    (
        "a seal opens with the first that leaves",
        "        if last:\n            try:",
        "        if True:\n            try:",
        _NEST,
    ),
    (
        "a seal stays shut after an error",
        "    try:\n        yield\n    finally:\n",
        "    yield\n    if True:\n",
        _NEST,
    ),
    (
        "worker processes inherit an address of MLflow",
        'os.environ[_URI] = "privtune-sealed://round"',
        "before = before",
        f"{_SEAL}::test_a_child_of_a_round_inherits_no_address",
    ),
    (
        "everybody can read the curator's log",
        "os.open(log, flags, 0o600)",
        "os.open(log, flags, 0o644)",
        _TALK,
    ),
    (
        "a notebook displays bars",
        "                _close_notebook()\n",
        "",
        f"{_SEAL}::test_a_notebook_displays_nothing_inside",
    ),
)

_AVERAGES = "tests/training/methods/test_rate_schedule.py"
_VIEWS = "tests/training/engine/test_views.py"
_TUNED = "tests/tasks/test_fine_tuning.py"

_in(
    "training/engine/train.py",
    (
        "the last iterate is released in place of the average",
        "params = member.narrowed(now.mean[row])",
        "params = member.narrowed(now.state.params[row])",
        _AVERAGES,
    ),
    (
        "gradients of views are added up, not averaged",
        "torch.stack([self.loss_of(model, view, y) for view in views]).mean(dim=0)",
        "torch.stack([self.loss_of(model, view, y) for view in views]).sum(dim=0)",
        _VIEWS,
    ),
    (
        "a loss that looks at one record is given all views of it",
        "return replace(self, together=same)",
        "return replace(self, together=True)",
        _VIEWS,
    ),
    (
        "one view of a record serves for all",
        "views = [self.augment(x) for _ in range(self.views)]",
        "views = [self.augment(x)] * self.views",
        _VIEWS,
    ),
)
_in(
    "training/engine/checkpoint.py",
    (
        "a training that goes on forgets the average that it had",
        "own = None if middle.mean is middle.state.params else middle.mean",
        "own = None",
        _AVERAGES,
    ),
)

_in(
    "study/_study.py",
    (
        "sealed trials are shown to anybody",
        "if any(plan.is_sealed for plan in self.plans):",
        "if False:",
        "tests/study/test_familiar.py",
    ),
)

_STUDY = "tests/study/test_study.py"
_CYCLE = "tests/study/test_lifecycle.py"
_STEPS = "tests/study/test_transitions.py"
_GONE = f"{_STUDY}::test_the_secret_and_the_losers_are_gone_after_the_release"

_in(
    "ledger/ledger.py",
    (
        "the secret of a round is kept",
        "                forget_secret(connection, budget, number)\n",
        "",
        f"{_STEPS}::test_the_secret_of_a_round_is_forgotten_with_its_arms",
    ),
)
_in(
    "study/rows.py",
    (
        "the secret of an arm is kept",
        'values(secret="")',
        "values(announced=0)",
        _GONE,
    ),
    (
        "models that lost are kept",
        '        self.results.within(f"sealed/{arm}").forget(connection)\n',
        "",
        _GONE,
    ),
    (
        "an arm changes its plan",
        "if there.digest() != plan.digest():",
        "if False:",
        "tests/study/test_optimize.py::test_a_timeout_releases_nothing_and_can_go_on",
    ),
)
_in(
    "study/lifecycle.py",
    (
        "no arm is sealed",
        "seal = sealed(self._log(plan), rehearsal=rehearsal) if plan.is_sealed else nullcontext()",
        "seal = nullcontext()",
        _TALK,
    ),
    (
        "training goes on outside of the seal",
        "            with life.seal(plan):\n                strategy",
        "            with nullcontext():\n                strategy",
        _TALK,
    ),
    (
        "the rehearsal goes on outside of the seal",
        "            with life.seal(plan, rehearsal=True):\n                seconds",
        "            with nullcontext():\n                seconds",
        _TALK,
    ),
    (
        "one row more than was drawn",
        "count=count, secret=secret)",
        "count=count + 1, secret=secret)",
        f"{_STEPS}::test_a_round_has_the_rows_that_were_drawn_and_the_seeds_of_its_arm",
    ),
    (
        "rows have seeds of another secret",
        "count=count, secret=secret)",
        "count=count)",
        f"{_STEPS}::test_a_round_has_the_rows_that_were_drawn_and_the_seeds_of_its_arm",
    ),
    (
        "every arm has the same known secret",
        "secrets.token_bytes(32))",
        "bytes(32))",
        f"{_STEPS}::test_every_arm_has_a_secret_of_its_own",
    ),
    (
        "arms of a seed share their noise",
        '.key(f"arm/{plan.arm}")',
        '.key("arm")',
        f"{_STEPS}::test_every_arm_has_a_secret_of_its_own",
    ),
    (
        "an arm trains before its charge has started",
        "self._move(charge, Kind.STARTED)",
        "pass",
        f"{_STEPS}::test_every_arm_trains_on_a_started_charge_and_none_shows_its_time",
    ),
    (
        "a private arm's release says how long it took",
        "                if not plan.is_private:  # else",
        "                if True:  # else",
        f"{_STEPS}::test_every_arm_trains_on_a_started_charge_and_none_shows_its_time",
    ),
    (
        "two processes run one study",
        "            if not alone:\n",
        "            if False:\n",
        f"{_CYCLE}::test_a_second_runner_is_told_in_one_sentence",
    ),
    (
        "arms are charged one by one",
        "    life.charge([*stages, *plans])\n    for stage in stages:\n"
        "        _release_stage(life, stage, measure)\n"
        "        refusal = stage.stage.refusal(life.stage_releases()[stage.arm])\n"
        "        if refusal and not anyway:\n            raise StageRefusedError(life.name, refusal)\n"
        "    releases = []\n    for plan in plans:\n",
        "    releases = []\n    for plan in plans:\n        life.charge([plan])\n",
        f"{_STUDY}::test_all_arms_are_charged_before_data_is_touched",
    ),
    (
        "an arm trains before it is charged",
        "            life.start(plan)\n            _train(life, plan,",
        "            _train(life, plan,",
        f"{_STEPS}::test_every_arm_trains_on_a_started_charge_and_none_shows_its_time",
    ),
)

_LEDGER = "tests/ledger/test_contract.py::TestLedger"
_FILTER = "tests/ledger/test_filter.py"
_ADMIT = "tests/ledger/test_admission.py"
_OVER = "tests/ledger/test_going_over.py"

_in(
    "ledger/admission.py",
    (
        "a closed budget admits",
        "    if history.closed:\n",
        "    if False:\n",
        f"{_LEDGER}::test_a_closed_budget_admits_nothing",
    ),
    (
        "a declared budget admits after its start",
        "if history.frozen and budget.admission is Admission.DECLARED:",
        "if False:",
        f"{_LEDGER}::test_a_declared_budget_is_closed_by_its_first_start",
    ),
    (
        "a hundredth more than the budget is admitted",
        "or _composed(events, budget).epsilon <= budget.epsilon",
        "or _composed(events, budget).epsilon <= 1.01 * budget.epsilon",
        f"{_ADMIT}::test_a_declared_block_is_the_budget_and_no_hundredth_more",
    ),
    (
        "twice the budget is admitted by sums of curves",
        "return quick <= budget.epsilon or",
        "return quick <= 2.0 * budget.epsilon or",
        f"{_ADMIT}::test_a_declared_block_is_the_budget_and_no_hundredth_more",
    ),
    (
        "what was charged before is forgotten",
        "together = (*history.block.values(), *asked)",
        "together = tuple(asked)",
        f"{_ADMIT}::test_a_declared_block_is_the_budget_and_no_hundredth_more",
    ),
    (
        "the filter does not count δ",
        "part(sum((d for _, d in exact), Fraction(0)), room_delta),",
        "0.0,",
        f"{_LEDGER}::test_approximate_dp_passes_the_filter_up_to_its_share",
    ),
    (
        "the filter does not count divergences",
        "part(sum((w for w, _ in exact), Fraction(0)), room),",
        "0.0,",
        f"{_OVER}::test_what_alone_is_more_than_the_filter_holds_is_refused",
    ),
    (
        "the filter uses δ that pays for something else",
        "share = FILTER_SHARE * budget.delta",
        "share = budget.delta",
        f"{_ADMIT}::test_block_and_filter_and_odometer_share_one_delta",
    ),
    (
        "the filter forgets what it admitted",
        "Fraction(state.capacity) - _used(history),",
        "Fraction(state.capacity),",
        f"{_LEDGER}::test_a_started_charge_stays_spent",
    ),
    (
        "what was recorded without a bound leaves room",
        "if history.unbounded or state.capacity is None:",
        "if state.capacity is None:",
        f"{_ADMIT}::test_a_broken_budget_shows_that_it_is_broken",
    ),
    (
        "the block is read at the whole δ while more may come",
        "block_epsilon(block, BLOCK_SHARE * budget.delta, budget.adjacency)",
        "block_epsilon(block, budget.delta, budget.adjacency)",
        f"{_ADMIT}::test_who_stops_at_will_has_at_most_delta",
    ),
    (
        "the odometer shows the budget although its filter is broken",
        "if room >= 0 and room_delta >= 0:",
        "if True:",
        f"{_ADMIT}::test_a_broken_budget_shows_that_it_is_broken",
    ),
    (
        "later charges pass as declared",
        "return BASIS_FILTER, weights",
        "return BASIS_DECLARED, weights",
        f"{_LEDGER}::test_the_filter_takes_over_after_the_first_start",
    ),
    (
        "the filter goes over beside what still runs",
        "if room >= 0 and not history.open:",
        "if room >= 0:",
        f"{_OVER}::test_it_goes_over_when_everything_else_is_done_and_back_if_nothing_ran",
    ),
)

_in(
    "ledger/history.py",
    (
        "what runs when the filter goes over is forgotten",
        "            self.open.add(entry.charge)\n",
        "            pass\n",
        f"{_OVER}::test_it_goes_over_when_everything_else_is_done_and_back_if_nothing_ran",
    ),
    (
        "a divergence after Gaussian charges is a log",
        "if basis == BASIS_FILTER and self.late:",
        "if False:",
        f"{_OVER}::test_the_wrong_order_is_no_log",
    ),
    (
        "what is recorded late weighs once",
        'if body["basis"] == BASIS_RECORDED and self.late:',
        "if False:",
        f"{_OVER}::test_what_is_recorded_late_weighs_twice",
    ),
)

_in(
    "ledger/weights.py",
    (
        "a profile is held to the Gaussian one at points alone",
        "top = gap[:-1] + np.clip(cross, 0.0, 1.0) * left",
        "top = gap[:-1]",
        f"{_OVER}::test_the_gap_is_looked_for_between_points_too",
    ),
    (
        "what exceeds a Gaussian profile is free",
        "    return Weight(variance + high * (1 + 1e-9), slack)",
        "    return Weight(variance + high * (1 + 1e-9), 0.0)",
        f"{_OVER}::test_a_weight_dominates_the_exact_profile_and_hardly_more",
    ),
    (
        "what is infinite is not looked at",
        "max(float(gap.max()), beyond) > slack",
        "float(gap.max()) > slack",
        f"{_OVER}::test_weights_as_gaussian",
    ),
)

_in(
    "ledger/certificate.py",
    (
        "Gaussian charges are not recomputed",
        "if basis in (BASIS_FILTER, BASIS_GAUSSIAN):",
        "if basis == BASIS_FILTER:",
        f"{_OVER}::test_a_false_weight_and_a_false_order_are_found",
    ),
)

_in(
    "ledger/privacy_filter.py",
    (
        "a few nodes refuse what all of them admit",
        "(1.0, above[-1], *above[2:], above[-1])",
        "(1.0, above[0], *above[1:])",
        "tests/ledger/test_filter.py::test_a_fifth_of_the_nodes_refuses_nothing_that_all_of_them_admit",
    ),
    (
        "the block's profile forgets what is below 0",
        "-math.expm1(-e) + math.exp(-e) * d",
        "math.exp(-e) * d",
        _FILTER,
    ),
    (
        "Gaussian charges take half of what they take",
        "return min(plain, max(0.0, top) / (order - 1)) *",
        "return min(plain, max(0.0, top) / (order - 1)) / 2 *",
        f"{_OVER}::test_what_gaussian_charges_take_of_a_filter",
    ),
    (
        "the conversion takes what is spent for less",
        "+ epsilon - spent",
        "+ epsilon - spent / 2",
        _FILTER,
    ),
    (
        "every line of the odometer has the whole share",
        "* delta / len(_LEVELS)",
        "* delta",
        f"{_FILTER}::test_the_readings_share_the_budgets_delta",
    ),
)

_ROUNDS = "tests/ledger/test_rounds.py"

_in(
    "ledger/rounds.py",
    (
        "results can be read early",
        "            if _count_open(connection, charge_id):\n                raise Round",
        "            if False:\n                raise Round",
        f"{_ROUNDS}::test_no_early_look",
    ),
    (
        "K is drawn again",
        "done.append(there or insert_round(connection, charge_id, count, secret))",
        "done.append(OpenRound(charge_id, count, there.secret) if there else"
        " insert_round(connection, charge_id, count, secret))",
        f"{_ROUNDS}::test_the_number_of_trials_is_never_drawn_twice",
    ),
)

_in(
    "ledger/rounds.py",
    (
        "a task kills workers for ever",
        "if row.attempts > self._max_attempts]",
        "if False]",
        f"{_ROUNDS}::test_a_task_that_kills_its_workers_stops_the_round_and_is_no_result",
    ),
)

_in(
    "ledger/rounds.py",
    (
        "all trials have one seed",
        '.key("trial", number)',
        '.key("trial", 0)',
        f"{_ROUNDS}::test_seeds_are_secret_and_fixed",
    ),
)

_in(
    "ledger/rounds.py",
    (
        "rows before the last are closed, too",
        "*of_round(charge_id), tasks.c.number > number,",
        "*of_round(charge_id),",
        f"{_ROUNDS}::test_a_result_can_end_its_round_and_leaves_the_rows_before_it_open",
    ),
    (
        "a second result replaces the first",
        '        tasks.c.number == sa.bindparam("of_number"),\n        tasks.c.done == 0,\n',
        '        tasks.c.number == sa.bindparam("of_number"),\n',
        f"{_ROUNDS}::test_the_first_result_stays",
    ),
    (
        "a score that is no number wins",
        "None if math.isnan(score) or score == -math.inf else score",
        "None if score == -math.inf else 1e9 if math.isnan(score) else score",
        f"{_ROUNDS}::test_a_score_that_is_not_a_number_is_the_worst",
    ),
)

_ACCOUNTANT = "tests/accounting/test_accountant.py"
_RDP = "tests/accounting/test_rdp.py"
_REGISTRY = "tests/accounting/test_registry.py"

_in(
    "accounting/compare.py",
    (
        "what is proved to cost more is certified",
        "if (ours := min(found.ours.epsilon, composed)) < lower:",
        "if False:",
        "tests/accounting/test_witness.py::test_an_account_that_promises_too_much_is_not_certified",
    ),
)

_in(
    "accounting/compare.py",
    (
        "losses that are rounded up prove nothing",
        "                pessimistic_estimate=False,\n                sampling_prob",
        "                pessimistic_estimate=True,\n                sampling_prob",
        "tests/accounting/test_witness.py::test_what_dp_accounting_proves_is_below_the_exact_epsilon",
    ),
)

_in(
    "accounting/registry.py",
    (
        "what is accounted under add-remove is asked under replace-one",
        "    if not known.replace_one:\n",
        "    if False:\n",
        f"{_ACCOUNTANT}::test_sampled_events_have_no_replace_one_account",
    ),
)

_in(
    "accounting/registry.py",
    (
        "half the Rényi divergence of a Gaussian",
        "return ORDERS / (2.0 * event.noise_multiplier**2)",
        "return ORDERS / (4.0 * event.noise_multiplier**2)",
        f"{_ACCOUNTANT}::test_gaussian_compositions_are_exact {_RDP}",
    ),
    (
        "Laplace releases cost half",
        "return 1.0 / event.noise_multiplier, 0.0",
        "return 0.5 / event.noise_multiplier, 0.0",
        f"{_ACCOUNTANT}::test_laplace_agrees_with_dp_accounting"
        f" {_ACCOUNTANT}::test_known_mechanisms",
    ),
    (
        "half of what zero-concentrated DP says",
        "return event.rho * ORDERS\n",
        "return 0.5 * event.rho * ORDERS\n",
        f"{_RDP}::test_conversions_are_inverse_and_above_the_truth",
    ),
    (
        "approximate DP that never fails",
        "np.full_like(ORDERS, np.inf) if event.delta > 0.0 else pure_curve(event.epsilon)",
        "pure_curve(event.epsilon)",
        f"{_RDP}::test_what_fails_outright_has_no_renyi_bound",
    ),
    (
        "the filter does not count failures of approximate DP",
        "    def fails(self, event: ApproximateDP) -> bool:\n        return True",
        "    def fails(self, event: ApproximateDP) -> bool:\n        return False",
        f"{_FILTER}::test_weights",
    ),
    (
        "what is not private has a guarantee",
        "class _NonPrivate(_Known[NonPrivate]):\n    private = False\n",
        "class _NonPrivate(_Known[NonPrivate]):\n    private = True\n",
        f"{_ACCOUNTANT}::test_non_private_is_infinite_everywhere",
    ),
    (
        "a release of all records passes as one of a sample",
        "return Counter({(event.rate, atoms): n",
        "return Counter({(1.0, atoms): n",
        f"{_TRANSCRIPT} {_REGISTRY}",
    ),
)

_in(
    "accounting/registry.py",
    (
        "the cheapest of several is charged",
        "return np.asarray(curves.max(axis=0))",
        "return np.asarray(curves.min(axis=0))",
        f"{_ACCOUNTANT}::test_parallel_is_the_maximum_and_worst_of_too {_RDP}",
    ),
    (
        "the cheapest part of the data is charged",
        "np.asarray(np.max([of(child) for child in event.events], axis=0))",
        "np.asarray(np.min([of(child) for child in event.events], axis=0))",
        f"{_ACCOUNTANT}::test_parallel_is_the_maximum_and_worst_of_too {_RDP}",
    ),
    (
        "a replaced record stays in its part",
        "        counts = Counter(event.events)\n        if len(event.events) == 1:\n",
        "        counts = Counter(event.events)\n        if True:\n",
        f"{_ACCOUNTANT}::test_a_replaced_record_may_move_to_another_part",
    ),
)

_in(
    "accounting/registry.py",
    (
        "the final training costs nothing",
        "return amplified_curve(ORDERS, tuning, event.rate) + training",
        "return amplified_curve(ORDERS, tuning, event.rate)",
        "tests/accounting/test_subsampled.py::test_the_final_training_is_paid_for_by_every_bound",
    ),
    (
        "a threshold that never gives up",
        "PrivateSelection(event.event, Geometric(1.0 / event.stop))",
        "PrivateSelection(event.event, Geometric(1.0))",
        "tests/accounting/test_selection.py::test_threshold_by_exact_enumeration"
        " tests/accounting/test_selection.py"
        "::test_a_known_threshold_costs_less_than_the_best_of_as_many",
    ),
)

_in(
    "strategies/tuning.py",
    (
        "a subset is tuned at the rate of all records",
        "replace(t, rate_factor=tuned / kept)",
        "replace(t, rate_factor=1.0)",
        "tests/strategies/test_runs.py"
        "::test_subsampled_tuning_tries_smaller_rates_and_releases_what_was_drawn",
    ),
)

_in(
    "accounting/curves.py",
    (
        "sure runs cost nothing beside a selection",
        "runs.sure_runs * curve + selection_curve(curve, runs.drawn, orders)",
        "selection_curve(curve, runs.drawn, orders)",
        "tests/accounting/test_selection.py::test_sure_runs_are_in_the_renyi_curve",
    ),
)

_in(
    "accounting/runs.py",
    (
        "a minimum of runs that is charged and not drawn",
        "            return self.drawn.pmf(values - self.sure_runs)\n",
        "            return self.drawn.pmf(values)\n",
        "tests/accounting/test_runs.py::test_a_minimum_adds_sure_runs_to_those_that_are_drawn",
    ),
    (
        "runs that are sure are left out of what is charged",
        "total = total + factor * x ** (sure - taken)",
        "total = total + factor * x ** (1 - taken)",
        "tests/accounting/test_selection.py::test_sure_runs_by_exact_enumeration",
    ),
)

_in(
    "training/engine/kernels.py",
    (
        "a model remembers what it met",
        "module, loss_of = fresh(self.module, self._loss_of)\n        with torch.enable_grad()",
        "module, loss_of = self.module, self._loss_of\n        with torch.enable_grad()",
        f"{_NEIGHBOURS}::test_one_record_more_moves_a_sum_by_its_bound",
    ),
)
_in(
    "training/engine/capture.py",
    (
        "a wide net computes whatever a narrow one does",
        "(name in _KEEP_ZEROS and _filled_up(name, one, two))",
        "_filled_up(name, one, two)",
        f"{_CANDIDATES}::test_what_a_wide_net_does_not_compute_is_trained_apart",
    ),
    (
        "numbers of a pass are no part of a program",
        'return f"{value!r};"',
        'return ";"',
        f"{_CANDIDATES}::test_other_programs_share_no_stack_and_equal_ones_do",
    ),
)
_in(
    "training/engine/optimizers.py",
    (
        "an optimizer that steps by itself takes any class's steps",
        'if kind.__module__.partition(".")[0] != "torch":',
        "if False:",
        f"{_CANDIDATES}::test_optimizers_that_are_refused_before_anything_is_drawn",
    ),
    (
        "a checkpoint forgets what an optimizer remembers",
        "tensor.data.copy_(part)",
        "pass",
        f"{_CANDIDATES}::test_a_candidate_goes_on_from_its_checkpoint_to_the_same_bits",
    ),
)
_in(
    "training/mechanism/kernel.py",
    (
        "a rule of a user's for vmap sees all records",
        "args[0].vmap is not torch.autograd.Function.vmap",
        "False",
        f"{_NEIGHBOURS}::test_one_record_more_moves_a_sum_by_its_bound",
    ),
)
_in(
    "training/mechanism/kernel.py",
    (
        "a record leaves traces in weights that copies share",
        "if written:",
        "if False:",
        f"{_NEIGHBOURS}::test_a_pass_that_writes_to_what_records_share_is_refused",
    ),
)
_in(
    "training/engine/passes.py",
    (
        "hooks on what is saved for the way back see all records",
        ', disable_saved_tensors_hooks("what is saved holds all records")',
        "",
        f"{_NEIGHBOURS}::test_one_record_more_moves_a_sum_by_its_bound",
    ),
)
_in(
    "training/engine/watch.py",
    (
        "a rule of a user's sees all records",
        "made = torch.vmap(one)(*(a[k].squeeze(1) for a in seen), g[k].squeeze(1))",
        "made = rule(layer, tuple(a[k].squeeze(1) for a in seen), g[k].squeeze(1))",
        f"{_RULES}::test_a_rule_sees_one_record",
    ),
    (
        "a part that runs again on the way back draws other numbers",
        "    if ACTIVE.watch is None:",
        "    if True:",
        f"{_CANDIDATES}::test_checkpointing_of_activations_changes_nothing",
    ),
    (
        "what autocast makes of a pass is said to couple records",
        "            if is_autocasting():",
        "            if False:",
        f"{_CANDIDATES}::test_autocast_is_refused_around_a_training_and_named_inside_of_one",
    ),
)
_in(
    "training/engine/capture.py",
    (
        "what a run writes to a constant stays there",
        "if written and known is not None and known.storage in self._fixed:",
        "if False:",
        f"{_RECORD}::test_what_one_run_writes_is_not_there_in_the_next",
    ),
)
_in(
    "training/engine/rules.py",
    (
        "norms of long gradients are too short",
        "if whole > 1:",
        "if False:",
        f"{_NORMS}::test_a_long_gradient_of_equal_numbers",
    ),
    (
        "words at many places lose more than their norm allows for",
        "gram, lengths, 0.5 * g.shape[2] + 2.0,",
        "gram, lengths, 2.0,",
        f"{_NORMS}::test_a_word_at_many_places",
    ),
    (
        "sums that are formed anew are longer than their norms",
        "slack = lengths * (roundings * torch.finfo(dtype).eps)",
        "slack = lengths * 0.0",
        f"{_NORMS}::test_a_word_at_many_places",
    ),
    (
        "a bias of another layer is clipped with the weight's",
        'all(b is None or b.rpartition(".")[0] == owner for b in shared)',
        "True",
        f"{_RULES}::test_a_bias_of_another_layer_is_clipped_with_its_own",
    ),
)
_in(
    "training/engine/fine_tuning.py",
    (
        "features of a frozen part are computed by a model that remembers",
        "whole, _ = fresh(self.whole)",
        "whole = self.whole",
        f"{_NEIGHBOURS}::test_features_of_a_frozen_part_hang_on_their_own_record",
    ),
    (
        "a frozen BatchNorm is left in training mode",
        "            part.eval()  # its running",
        "            pass  # its running",
        f"{_TUNED}::test_a_frozen_batchnorm_is_an_affine_map_and_stays_one",
    ),
    (
        "adapters of GPT-2 have the sizes of the other side",
        "sizes = base.weight.shape if isinstance(base, nn.Linear) else base.weight.shape[::-1]",
        "sizes = base.weight.shape",
        f"{_TUNED}::test_adapters_of_convolutions_and_of_gpt2_start_as_the_public_model",
    ),
)
_in(
    "tasks/_fine_tuning.py",
    (
        "a file of weights runs a program",
        "weights_only=True",
        "weights_only=False",
        f"{_TUNED}::test_a_state_dict_of_torch_is_read_and_no_other_pickle_is_run",
    ),
)
_QUERIES = "tests/tasks/test_queries.py"
_USABLE = "tests/study/test_usable.py"
_in(
    "tasks/_sql.py",
    (
        "a query may hold parts that are not known",
        "elif name not in _KNOWN_PARTS:",
        "elif False:",
        f"{_QUERIES}::test_what_may_look_at_other_rows_is_refused_by_name",
    ),
    (
        "a query may limit, sample or order rows",
        "if more := [field for field in used if field not in allowed]:",
        "if more := []:",
        f"{_QUERIES}::test_what_may_look_at_other_rows_is_refused_by_name",
    ),
    (
        "a query may call any function",
        "if part.name.lower() not in _KNOWN_FUNCTIONS:",
        "if False:",
        f"{_QUERIES}::test_what_may_look_at_other_rows_is_refused_by_name",
    ),
    (
        "a comment hides what the database runs",
        "if any(token.comments for token in tokens):",
        "if False:",
        f"{_QUERIES}::test_what_may_look_at_other_rows_is_refused_by_name",
    ),
    (
        "a view stands for a table",
        "if len(tables) != 1 or views or table.catalog",
        "if table.catalog",
        f"{_QUERIES}::test_a_view_is_no_table",
    ),
)
_in(
    "tasks/stages.py",
    (
        "a count of usable records has half of its noise",
        "        return 1.0\n",
        "        return 0.5\n",
        f"{_USABLE}::test_one_record_moves_the_count_by_one_at_most {_USABLE}::test_the_event_and_the_noise",
    ),
)
_in(
    "study/run.py",
    (
        "the public learns why a run stopped",
        'UnusableRecordsError(self.life.name, "" if told is None else found.reason)',
        "UnusableRecordsError(self.life.name, found.reason)",
        f"{_USABLE}::test_a_wrong_file_spends_nothing",
    ),
    (
        "a run of unusable records is charged",
        "if found.reason and not anyway:",
        "if False:",
        f"{_USABLE}::test_a_wrong_file_spends_nothing",
    ),
)
_ONE = "tests/tasks/test_one_record.py"
_in(
    "tasks/_reader.py",
    (
        "a quote that stays open swallows the lines after it",
        """if b'"' in block:""",
        "if False:",
        f"{_ONE}::test_one_record_changes_no_other",
    ),
    (
        "one line that holds no object ends the reading of all",
        "except (ValueError, RecursionError):",
        "except ():",
        f"{_ONE}::test_one_record_changes_no_other",
    ),
    (
        "one half of a character ends the reading of all",
        'return str(cell).encode(errors="replace").decode()',
        "return str(cell).encode().decode()",
        f"{_ONE}::test_one_record_changes_no_other",
    ),
)

_REFUSED = "tests/zoo/test_traps.py::test_a_refused_trap_charges_nothing_and_says_why"
_HARMLESS = (
    "tests/zoo/test_traps.py::test_a_harmless_trap_runs_and_a_record_moves_no_more_than_its_bound"
)

_in(
    "study/rehearsal.py",
    (
        "trials that depend on each other are selected from",
        "    check(other)\n    check(one)\n    found = between()\n    check(one)\n",
        "    found = between()\n",
        _REFUSED,
    ),
)

_in(
    "study/build.py",
    (
        "a trial starts from the weights of an earlier one",
        "_check_new(model, *(p for p in model.parameters() if p.requires_grad))",
        "_check_new(model)",
        _REFUSED,
    ),
)

_in(
    "training/engine/optimizers.py",
    (
        "an optimizer reads data by a hook on its steps",
        "    if any(found):",
        "    if False:",
        _REFUSED,
    ),
    (
        "an optimizer trains parameters of another model",
        "    if held != trainable:",
        "    if not held:",
        _REFUSED,
    ),
)

_in(
    "training/engine/kernels.py",
    (
        "batch statistics in evaluation mode are taken for fixed",
        "return not norm.training and norm.running_mean is not None",
        "return not norm.training",
        _REFUSED,
    ),
    (
        "a BatchNorm that learns from the batch is taken for fixed",
        "return not norm.training and norm.running_mean is not None",
        "return norm.running_mean is not None",
        _REFUSED,
    ),
)

_in(
    "execution/fine_tuned.py",
    (
        "a loss without a gradient spends the budget",
        "    if not expected.requires_grad:",
        "    if False:",
        _REFUSED,
    ),
)

_in(
    "training/mechanism/kernel.py",
    (
        "a trained table is what the next trial starts from",
        "named[name].data = value.to(named[name], copy=True)",
        "named[name].data.copy_(value)",
        _HARMLESS,
    ),
)

_in(
    "tasks/_partition.py",
    (
        "a record's split hangs on where it stands",
        "            for r in records\n",
        '            for r in (b"%d" % n for n in range(len(y)))\n',
        "tests/tasks/test_partition.py",
    ),
)
