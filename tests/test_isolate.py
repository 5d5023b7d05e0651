"""Real crashes, hangs, floods of output and kills: each costs one worker, and the next query still works.

With `TORCHDELTA_TEST_SPAWN=1` (`make test-spawn`) the same tests run on a system without `os.fork`.
"""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from torchdelta import errors
from torchdelta.isolate import process_groups
from torchdelta.isolate.directories import PoolDirectory, sweep
from torchdelta.isolate.pool import CAN_FORK, Pool, merge_interrupts
from torchdelta.isolate.supervisor import KEPT_OUTPUT_BYTES, Limits, Outcome
from torchdelta.records.failure import Failure

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="looks at processes through /proc"),
    pytest.mark.xdist_group("isolate"),  # the pools of this module are started once
]

_TESTS = Path(__file__).parent
_GIB = 2**30
needs_fork = pytest.mark.skipif(not CAN_FORK, reason="is about the zygote, which needs os.fork")


@pytest.fixture(scope="module", autouse=True)
def importable_tasks():
    sys.path.insert(0, str(_TESTS))
    yield
    sys.path.remove(str(_TESTS))


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("isolate")


@pytest.fixture(scope="module")
def forking_pool(root):
    with Pool(root=root, forks=True) as pool:
        yield pool


@pytest.fixture(scope="module")
def spawning_pool(root):
    with Pool(root=root, forks=False) as pool:
        yield pool


@pytest.fixture
def default_pool(request):
    """A pool that starts workers as this system does by default; `make test-spawn` makes that spawning."""
    return request.getfixturevalue("forking_pool" if CAN_FORK else "spawning_pool")


_SLOW_IF_EXTRA = [pytest.mark.slow] if CAN_FORK else []


@pytest.fixture(params=[pytest.param("forking", marks=needs_fork), pytest.param("spawning", marks=_SLOW_IF_EXTRA)])
def pool(request):
    """Both ways to start workers; a test begins with whatever the test before it did to its pool."""
    return request.getfixturevalue(f"{request.param}_pool")


def ask(pool, task, *, deadline_s=60, memory_bytes=None, **request):
    return pool.ask(f"isolate_tasks:{task}", request, deadline_s=deadline_s, memory_bytes=memory_bytes)


def is_alive(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition, seconds=30):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "the condition did not become true"
        time.sleep(0.02)


# answers


def test_the_answer_is_what_the_task_returned(pool):
    outcome = ask(pool, "echo", numbers=[1, 2.5, None], text="ä")

    assert outcome.answer["request"] == {"numbers": [1, 2.5, None], "text": "ä"}
    assert outcome.failure is None


def test_each_query_has_a_process_group_scratch_and_cache_of_its_own(pool):
    first, second = (ask(pool, "describe").answer for _ in range(2))

    for name in ("process", "scratch", "cache"):
        assert first[name] != second[name]
    assert first["group"] == first["session"] == first["process"]
    assert second["files"] == ["mine"]
    assert not Path(first["scratch"]).exists() or not list(Path(first["scratch"]).iterdir())


def test_all_output_of_a_worker_and_its_children_is_in_the_outcome(pool):
    output = ask(pool, "write_everywhere").output

    for words in ("python", "python's errors", "descriptor", "c", "child"):
        assert words in output.splitlines()


def test_only_the_end_of_long_output_is_kept(default_pool):
    outcome = ask(default_pool, "write", kibibytes=100)

    assert outcome.answer == {}
    assert len(outcome.output) == KEPT_OUTPUT_BYTES


@pytest.mark.parametrize(("what", "kind"), [("list", "TypeError"), ("nan", "ValueError"), ("object", "TypeError")])
def test_an_answer_that_is_not_a_strict_json_object_is_the_tasks_exception(default_pool, what, kind):
    failure = ask(default_pool, "answer_oddly", what=what).failure

    assert (failure.kind, failure.type) == ("exception", kind)


def test_a_request_that_is_not_strict_json_is_refused_at_once(default_pool):
    with pytest.raises(ValueError, match="JSON"):
        ask(default_pool, "echo", x=float("nan"))


@pytest.mark.parametrize("task", ["isolate_tasks", "__main__:echo"])
def test_a_task_that_no_other_process_can_import_is_refused_at_once(default_pool, task):
    with pytest.raises(errors.UsageError, match=r"package\.module:function"):
        default_pool.submit(task, {}, deadline_s=1)


def test_a_task_that_does_not_exist_is_an_exception(default_pool):
    assert ask(default_pool, "no_such_task").failure.type == "AttributeError"


@pytest.mark.skipif(CAN_FORK, reason="only `make test-spawn` removes os.fork")
def test_no_process_of_a_pool_can_fork_where_the_system_cannot(default_pool):
    assert ask(default_pool, "describe").answer["can_fork"] is False


# deaths


def test_a_segfault_is_a_signal_with_the_last_output_and_the_part_in_which_it_happened(pool):
    outcome = ask(pool, "segfault")

    assert (outcome.failure.kind, outcome.failure.type) == ("signal", "SIGSEGV")
    assert outcome.part == outcome.failure.signature.stage == "run"
    assert "the last words" in outcome.output
    assert "in segfault" in outcome.output


def test_an_abort_is_a_signal(default_pool):
    assert ask(default_pool, "abort").failure.type == "SIGABRT"


@pytest.mark.parametrize("name", ["SIGILL", "SIGKILL", "SIGTERM", "SIGFPE"])
def test_a_signal_is_named(default_pool, name):
    failure = ask(default_pool, "send_itself", signal=name).failure

    assert (failure.kind, failure.type) == ("signal", name)


@pytest.mark.parametrize("task", ["leave", "exit_by_exception"])
@pytest.mark.parametrize("status", [0, 3])
def test_leaving_without_an_answer_is_an_exit(default_pool, task, status):
    failure = ask(default_pool, task, status=status).failure

    assert (failure.kind, failure.type) == ("exit", str(status))


def test_the_message_of_an_exit_is_in_the_output(default_pool):
    outcome = ask(default_pool, "exit_with_message")

    assert outcome.failure.type == "1"
    assert "no such thing" in outcome.output


def test_a_hang_that_ignores_sigterm_is_a_timeout(pool):
    assert ask(pool, "hang_ignoring_sigterm", deadline_s=1).failure.kind == "timeout"


def test_a_hang_outside_of_python_is_a_timeout(default_pool):
    assert ask(default_pool, "hang_in_c", deadline_s=1).failure.kind == "timeout"


def test_a_hang_says_where_it_was(default_pool):
    assert "in hang_in_c" in ask(default_pool, "hang_in_c", deadline_s=0.5).output


def test_a_task_that_ends_within_its_deadline_has_not_timed_out(default_pool):
    assert ask(default_pool, "hang", deadline_s=20, seconds=0.3).answer == {}


def test_runaway_memory_is_stopped(pool):
    outcome = ask(pool, "eat", memory_bytes=_GIB, mebibytes=4096)

    assert outcome.failure.kind == "memory"
    assert "1024 MiB" in outcome.failure.message


@pytest.mark.parametrize("task", ["eat_in_a_child", "eat_at_once"])
def test_memory_of_children_and_one_large_allocation_count(default_pool, task):
    assert ask(default_pool, task, memory_bytes=_GIB, mebibytes=4096).failure.kind == "memory"


def test_memory_within_the_limit_is_not_stopped(default_pool):
    assert ask(default_pool, "eat_at_once", memory_bytes=_GIB, mebibytes=256).answer == {"bytes": 256 << 20}


def test_endless_output_is_stopped(pool):
    outcome = ask(pool, "write", kibibytes=1 << 22)

    assert outcome.failure.kind == "output"
    assert len(outcome.output) == KEPT_OUTPUT_BYTES


def test_an_exception_comes_back_with_type_message_and_traceback(pool):
    outcome = ask(pool, "fail", type="ValueError", message="size 3 is odd")

    assert (outcome.failure.kind, outcome.failure.type) == ("exception", "ValueError")
    assert outcome.failure.message == "size 3 is odd"
    assert "in fail" in outcome.failure.traceback
    with pytest.raises(RuntimeError, match="the task: size 3 is odd"):  # a ValueError is not an error of torchdelta
        outcome.read(dict, "value", program="the task")


@pytest.mark.parametrize("kind", ["UsageError", "TooOdd"])
def test_torchdeltas_own_error_can_be_raised_again(default_pool, kind):
    outcome = ask(default_pool, "fail", type=kind, message="no such policy")

    with pytest.raises(errors.UsageError, match="no such policy"):
        outcome.read(dict, "value", program="the task")


def test_signatures_of_failures_differ_by_kind_and_type_but_not_by_limit():
    failures = [
        Failure.of_timeout(5, stage="run"),
        Failure.of_memory(5, stage="run"),
        Failure.of_output(5, stage="run"),
        Failure.of_exit(0, stage="run"),
        Failure.of_exit(1, stage="run"),
        Failure.of_signal("SIGILL", stage="run"),
        Failure.of_signal("SIGSEGV", stage="run"),
    ]

    assert len({failure.signature for failure in failures}) == len(failures)
    assert Failure.of_timeout(50, stage="run").signature == failures[0].signature
    assert Failure.of_memory(50, stage="run").signature == failures[1].signature


def test_an_outcome_is_an_answer_or_a_failure():
    with pytest.raises(ValueError, match="either"):
        Outcome()


def test_limits_are_positive(default_pool):
    with pytest.raises(errors.UsageError, match="deadline"):
        Limits(deadline_s=0)
    with pytest.raises(errors.UsageError, match="memory"):
        ask(default_pool, "eat", memory_bytes=0, mebibytes=1)


# no process stays


@pytest.mark.parametrize("daemon", [False, pytest.param(True, marks=needs_fork)])
def test_processes_that_a_task_leaves_behind_are_ended(default_pool, daemon):
    child = ask(default_pool, "leave_a_child", daemon=daemon).answer["child"]

    wait_until(lambda: not is_alive(child))


def test_a_query_can_be_cancelled_while_it_runs_and_while_it_waits(default_pool):
    running = default_pool.submit("isolate_tasks:hang", {}, deadline_s=600)
    waiting = default_pool.submit("isolate_tasks:echo", {}, deadline_s=600)
    wait_until(lambda: running.part)

    waiting.cancel()
    running.cancel()

    assert running.result().failure.kind == waiting.result().failure.kind == "cancelled"
    assert running.part.startswith("asleep")
    assert not is_alive(int(running.part.split()[1]))


@pytest.mark.slow
def test_several_queries_run_at_once_and_one_that_dies_disturbs_no_other(root):
    with Pool(root=root, workers=2) as pool:
        sleeping = pool.submit("isolate_tasks:hang", {"seconds": 3}, deadline_s=60)
        wait_until(lambda: sleeping.part)
        assert ask(pool, "segfault").failure.type == "SIGSEGV"
        assert not sleeping.is_done()

        assert sleeping.result().answer == {}


@needs_fork
@pytest.mark.slow
def test_a_zygote_that_dies_is_started_again_and_the_query_with_it(root, tmp_path):
    with Pool(root=root) as pool:
        before = ask(pool, "describe").answer["parent"]

        assert ask(pool, "kill_zygote", once=True, unless=str(tmp_path / "done")).answer
        assert ask(pool, "describe").answer["parent"] != before


@needs_fork
@pytest.mark.slow
def test_a_query_that_kills_two_zygotes_is_a_failure(root, tmp_path):
    with Pool(root=root) as pool:
        failure = ask(pool, "kill_zygote", once=False, unless=str(tmp_path / "done")).failure

        assert (failure.kind, failure.type) == ("signal", "SIGKILL")
        assert ask(pool, "echo").answer


@needs_fork
def test_the_zygote_has_one_thread(forking_pool):
    ask(forking_pool, "echo")

    assert ask(forking_pool, "threads_of_parent").answer == {"threads": 1}


@pytest.mark.parametrize("forks", [pytest.param(True, marks=needs_fork), False])
def test_a_worker_that_cannot_start_says_why(root, forks):
    with (
        Pool(root=root, forks=forks, preload=["no_such_module"]) as pool,
        pytest.raises(errors.EnvironmentUnfit, match="No module named 'no_such_module'"),
    ):
        ask(pool, "echo")


@pytest.mark.slow
def test_a_zygote_that_cannot_warm_up_starts_cold(root, monkeypatch):
    monkeypatch.setenv("CXX", "/bin/false")
    with Pool(root=root, warm="inductor") as pool:
        assert ask(pool, "echo").answer


_FORKS_ITSELF = """
    import sys, threading
    from pathlib import Path
    from torchdelta.isolate.zygote_start import is_forkable
    from torchdelta.isolate.pool import Pool

    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    was_forkable = [is_forkable()]
    thread.start()
    was_forkable.append(is_forkable())
    stop.set()
    thread.join()
    import torch
    was_forkable.append(is_forkable())
    sys.modules["only_here"] = sys
    print(*was_forkable, end=" ")  # not flushed
    with Pool(root=Path({root!r}), from_here=True) as pool:
        def ask(task, **request):
            return pool.ask("isolate_tasks:" + task, request, deadline_s=60)
        print(ask("is_imported", name="only_here").answer["is_imported"], end=" ")
        print(ask("segfault").failure.type, end=" ")
        print(ask("threads_of_parent").answer["threads"], end=" ")
        print(repr(ask("echo").output), end=" ")
        ask("kill_zygote", once=True, unless={done!r})
        print(ask("is_imported", name="only_here").answer["is_imported"])
"""


@needs_fork
@pytest.mark.slow
def test_a_process_without_threads_or_torch_forks_a_zygote_from_itself_once(tmp_path):
    script = textwrap.dedent(_FORKS_ITSELF.format(root=str(tmp_path / "pools"), done=str(tmp_path / "done")))
    completed = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=False,
    )

    assert completed.stdout.split() == ["True", "False", "False", "True", "SIGSEGV", "1", "''", "False"], (
        completed.stderr
    )
    assert not completed.stderr
    assert not list((tmp_path / "pools").iterdir())


_SCRIPT = """
    import sys, time
    from pathlib import Path
    from torchdelta.isolate.pool import Pool

    with Pool(root=Path({root!r}), workers=2, **{ways}) as pool:
        queries = [pool.submit("isolate_tasks:" + task, {{}}, deadline_s=600) for task in ("hang", "hang_in_c")]
        while not all(query.part for query in queries):
            time.sleep(0.02)
        print(*(query.part.split()[1] for query in queries), flush=True)
        queries[0].result()
"""


_WAYS = [
    pytest.param({}, id="forked", marks=needs_fork),
    pytest.param({"from_here": True}, id="forked from here", marks=needs_fork),
    pytest.param({"forks": False}, id="spawned"),
]


@pytest.fixture(params=_WAYS)
def busy_parent(request, tmp_path):
    """A process with two busy workers, the ids of all its descendants, and the root of its pool."""
    script = tmp_path / "parent.py"
    script.write_text(textwrap.dedent(_SCRIPT.format(root=str(tmp_path / "pools"), ways=request.param)))
    process = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        start_new_session=True,
    )
    family = []
    try:
        workers = [int(number) for number in process.stdout.readline().split()]
        family = _family_of(process.pid)
        assert len(workers) == 2
        assert set(workers) < set(family)
        yield process, family, tmp_path / "pools"
    finally:
        process.kill()
        process.communicate()
        for number in filter(is_alive, family):
            os.kill(number, signal.SIGKILL)


def _family_of(process):
    children = process_groups.children_of(process)
    return children + [number for child in children for number in _family_of(child)]


@pytest.mark.parametrize("by", ["directory", "pipe"])
def test_a_task_that_replaces_the_file_of_its_parts_still_has_an_outcome(pool, by):
    outcome = ask(pool, "replace_its_parts", by=by)

    assert outcome.answer == {}
    assert outcome.parts == ("before",)


def test_a_root_that_cannot_be_made_is_an_error_with_its_reason(tmp_path):
    (tmp_path / "file").write_text("")

    with pytest.raises(errors.EnvironmentUnfit, match="File exists"), PoolDirectory(tmp_path / "file"):
        pass
    with PoolDirectory(tmp_path / "directory") as directory:
        assert directory.path.is_dir()


def test_a_disk_without_locks_is_an_error_and_not_an_endless_loop(tmp_path, monkeypatch):
    monkeypatch.setattr("torchdelta.records.file_locks._try_lock", lambda _: False)

    with pytest.raises(errors.EnvironmentUnfit, match="cannot be locked"), PoolDirectory(tmp_path):
        pass
    assert not list(tmp_path.iterdir())


def test_a_machine_without_room_for_temporary_files_is_an_error_with_its_reason(monkeypatch):
    def fail():
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr("tempfile.gettempdir", fail)

    with pytest.raises(errors.EnvironmentUnfit, match="No usable temporary directory found: make room"):
        Pool()


@pytest.mark.slow
def test_no_process_outlives_a_killed_parent_and_its_files_are_swept(busy_parent):
    process, family, root = busy_parent

    process.kill()
    process.wait()
    wait_until(lambda: not any(map(is_alive, family)))

    assert [path for path in root.iterdir() if path.is_dir()]
    with PoolDirectory(root) as directory:
        assert [path for path in root.iterdir() if path.is_dir()] == [directory.path]


@pytest.mark.slow
def test_no_process_outlives_a_ctrl_c_and_no_file_is_left(busy_parent):
    process, family, root = busy_parent

    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to every process in the foreground
    _, complaint = process.communicate(timeout=60)

    assert "KeyboardInterrupt" in complaint
    assert not any(map(is_alive, family))
    assert not list(root.iterdir())


@pytest.mark.slow
def test_no_process_outlives_a_killed_zygote_whose_parent_is_killed_too(busy_parent):
    process, family, _ = busy_parent

    os.kill(process.pid, signal.SIGSTOP)  # so that it cannot start another
    for number in process_groups.children_of(process.pid):
        os.kill(number, signal.SIGKILL)
    process.kill()

    wait_until(lambda: not any(map(is_alive, family)))


@pytest.fixture
def handled_by():
    """A function that sets the handler of SIGINT; the handler from before, perhaps of an open pool, is put back."""
    before = signal.getsignal(signal.SIGINT)
    yield lambda handler: signal.signal(signal.SIGINT, handler)
    signal.signal(signal.SIGINT, before)


def test_several_interrupts_within_a_second_raise_once(handled_by, monkeypatch):
    handled_by(signal.default_int_handler)
    calls = []
    with merge_interrupts():
        for _ in range(3):
            try:
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt:
                calls.append("interrupted")
        assert calls == ["interrupted"]
        monkeypatch.setattr("torchdelta.isolate.pool.SAME_INTERRUPT_S", 0.0)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)

    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_handler_of_the_users_stays(handled_by):
    calls = []
    handled_by(lambda *_: calls.append("handled"))
    with merge_interrupts():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    assert calls == ["handled", "handled"]


def test_the_directory_of_an_open_pool_is_not_swept(tmp_path):
    with PoolDirectory(tmp_path) as living:
        sweep(tmp_path)
        with PoolDirectory(tmp_path) as other:
            assert living.path.is_dir()
            assert other.path.is_dir()

    assert not list(tmp_path.iterdir())


# the compiler


@pytest.mark.slow
@pytest.mark.parametrize("warm", ["", "inductor"])
def test_workers_have_graph_caches_of_their_own_and_share_precompiled_headers(root, warm):
    with Pool(root=root, warm=warm) as pool:
        first = ask(pool, "compile_relu", deadline_s=300, factor=2).answer
        second = ask(pool, "compile_relu", deadline_s=300, factor=2).answer

    for answer in (first, second):
        assert answer["is_right"]
        assert answer["graphs"] > 0
        assert answer["hits"] == 0
        assert answer["new_headers"] == []
    assert first["headers"] == second["headers"] != []


@pytest.mark.slow
@pytest.mark.skipif(os.cpu_count() == 1, reason="one core compiles one kernel at a time")
def test_kernels_are_compiled_in_parallel_without_helper_processes(root, monkeypatch):
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS")
    with Pool(root=root, warm="inductor") as pool:
        outcome = ask(pool, "compile_two_kernels", deadline_s=300, factor=3.25)

    assert outcome.answer == {"children": []}
