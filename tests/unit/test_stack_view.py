"""The user's own code on a stack, and the thread that matters."""

from __future__ import annotations

import pytest

from gpulse.diagnosis.code_lines import choose_views, is_own_code, view_stack
from gpulse.model.python_stack import ProcessStacks, StackFrame, ThreadStack

LIB = "/opt/conda/lib/python3.11"
TORCH = f"{LIB}/site-packages/torch"
TRAIN = StackFrame("/home/u/train.py", 84, "train")
MAIN = StackFrame("/home/u/train.py", 120, "<module>")
ENCODER = StackFrame(f"{LIB}/json/encoder.py", 258, "iterencode", "json/encoder.py")
QUEUE_GET = StackFrame(f"{LIB}/threading.py", 320, "Condition.wait", "threading.py")


def thread(
    *frames: StackFrame, name: str = "MainThread", active: bool = True, code: str | None = None
) -> ThreadStack:
    """A thread with these frames, innermost first."""
    return ThreadStack(name, None, active, frames, code)


def dump(*threads: ThreadStack) -> ProcessStacks:
    """A dump of one process."""
    return ProcessStacks(1, 0.0, threads)


@pytest.mark.parametrize(
    ("file", "own"),
    [
        ("/home/u/train.py", True),
        ("train.py", True),
        ("/home/u/src/mypackage/data.py", True),
        ("/tmp/ipykernel_77/123.py", True),
        ("<ipython-input-3-abc>", True),
        (f"{LIB}/json/encoder.py", False),
        ("/usr/lib64/python3.9/threading.py", False),
        ("/usr/lib/python3/dist-packages/numpy/core.py", False),
        ("/home/u/.local/lib/python3.12/site-packages/torch/nn/module.py", False),
        ("/usr/lib/python311.zip/json/decoder.py", False),
        ("<frozen importlib._bootstrap>", False),
        ("<string>", False),
        ("<eval_with_key>.5", False),
        ("/tmp/torchinductor_u/ab/cabc.py", False),
        ("/home/u/bin/train", True),
        ("/work/gpulse/src/gpulse/profiling/profiler.py", False),
    ],
)
def test_own_code_is_told_from_libraries(file: str, own: bool) -> None:
    """By its path."""
    assert own == is_own_code(StackFrame(file, 1, "f"))


def test_a_command_of_an_environment_is_not_own_code() -> None:
    """But a user's script in a directory of that name is, whatever it calls."""
    serve = StackFrame(f"{LIB}/site-packages/vllm/main.py", 9, "serve")
    launcher = StackFrame("/opt/conda/bin/vllm", 8, "<module>")
    script = StackFrame("/home/u/bin/train", 30, "<module>")

    assert (serve,) == view_stack(thread(serve, launcher)).lines
    assert (script,) == view_stack(thread(serve, script)).lines
    assert (TRAIN,) == view_stack(thread(TRAIN, serve, launcher)).lines


def test_the_line_is_the_innermost_of_the_users_code() -> None:
    """Whatever runs inside it."""
    view = view_stack(thread(ENCODER, TRAIN, MAIN))

    assert (TRAIN, ENCODER) == (view.line, view.innermost)


def test_a_comprehension_belongs_to_its_function() -> None:
    """In all its levels, with and without a qualified name."""
    nested = StackFrame(TRAIN.file, 84, "train.<locals>.<listcomp>.<genexpr>")
    bare = StackFrame(TRAIN.file, 84, "<listcomp>")

    assert (TRAIN, MAIN) == view_stack(thread(nested, bare, TRAIN, MAIN)).lines


def test_a_function_that_torch_compile_continues_keeps_its_name() -> None:
    """The name of the continuation means nothing to its author."""
    resumed = StackFrame(TRAIN.file, 84, "torch_dynamo_resume_in_train_at_80")

    assert "train" == view_stack(thread(resumed)).line.function


def test_a_forked_worker_has_only_its_own_frames() -> None:
    """Below them are those that its parent had at the fork."""
    getitem = StackFrame("/home/u/data.py", 30, "Texts.__getitem__")
    fetch = StackFrame(f"{TORCH}/utils/data/_utils/fetch.py", 52, "fetch")
    start = StackFrame(f"{LIB}/multiprocessing/process.py", 314, "BaseProcess._bootstrap")
    view = view_stack(thread(getitem, fetch, start, TRAIN, MAIN))

    assert (getitem,) == view.lines


@pytest.mark.parametrize("file", ["<string>", "<stdin>", "<command-123>"])
def test_a_program_without_a_file_is_own_code(file: str) -> None:
    """Its generated code is not told apart; that of programs with a file is none of theirs."""
    step, root = StackFrame(file, 4, "step"), StackFrame(file, 9, "<module>")

    assert (step, root) == view_stack(thread(ENCODER, step, root)).lines
    assert (MAIN,) == view_stack(thread(StackFrame("<string>", 2, "__init__"), MAIN)).lines


def test_a_package_that_waits_for_the_gpu_is_not_the_cause() -> None:
    """Where a program's own code is not known, the stack still counts as time spent elsewhere."""
    item = StackFrame(f"{LIB}/site-packages/wrapper/result.py", 35, "item")
    views = choose_views(dump(thread(item, code="tensor.item()")), "main")

    assert [()] == [view.lines for view in views]


def test_without_own_code_the_outermost_package_counts() -> None:
    """But not the data loader around it."""
    folder = StackFrame(f"{LIB}/site-packages/torchvision/datasets/folder.py", 245, "__getitem__")
    image = StackFrame(f"{LIB}/site-packages/PIL/Image.py", 900, "load")
    fetch = StackFrame(f"{TORCH}/utils/data/_utils/fetch.py", 52, "fetch")

    assert (folder,) == view_stack(thread(image, folder, fetch)).lines


@pytest.mark.parametrize(
    ("code", "waits"),
    [
        ("total += loss.item()", "gpu"),
        ("torch.cuda.synchronize()", "gpu"),
        ("x = y.to('cpu')", "gpu"),
        ("value = float(loss)", "gpu"),
        ("value = float(self.loss_sum)", "gpu"),
        ("jax.device_get(state)", "gpu"),
        ("event.synchronize()", "gpu"),
        ("print(loss)", None),
        ("rows = [int(word) for word in line.split()]", None),
        ("rows = [float(word) for word in line.split()]", None),
        ("if bool(found):", None),
        ("row = rows.get()", None),
        ("items = list(rows)", None),
        (None, None),
    ],
)
def test_calls_that_wait_for_the_gpu_are_known(code: str | None, waits: str | None) -> None:
    """By the source of the innermost line."""
    assert waits == view_stack(thread(TRAIN, MAIN, code=code)).waits_for


def test_the_main_thread_is_chosen() -> None:
    """Other threads run as well, but do not feed the GPU."""
    other = thread(StackFrame("/home/u/monitor.py", 5, "poll"), name="Thread-1")
    (view,) = choose_views(dump(other, thread(TRAIN, MAIN)), "main")

    assert TRAIN == view.line


def test_a_main_thread_that_waits_gives_way_to_the_thread_that_works() -> None:
    """A thread of the library, or one that sleeps, is not such a thread."""
    decode = StackFrame("/home/u/data.py", 12, "decode")
    (view,) = choose_views(
        dump(
            thread(QUEUE_GET, TRAIN, MAIN),
            thread(decode, name="loader"),
            thread(StackFrame("/home/u/beat.py", 3, "beat"), name="beat", active=False),
            thread(StackFrame(f"{TORCH}/utils/data/_utils/pin_memory.py", 50, "do"), name="pin"),
        ),
        "main",
    )

    assert decode == view.line


def test_a_main_thread_that_waits_alone_is_the_answer() -> None:
    """Nothing else runs, so its line is what is known."""
    (view,) = choose_views(dump(thread(QUEUE_GET, TRAIN, MAIN)), "main")

    assert (TRAIN, "others") == (view.line, view.waits_for)


def test_a_worker_without_a_task_is_not_counted() -> None:
    """It waits for work, so it holds nobody up."""
    assert [] == choose_views(dump(thread(QUEUE_GET, TRAIN, MAIN)), "worker")


def test_the_lock_of_a_queue_is_a_part_of_the_wait() -> None:
    """A lock of the user's own is not."""
    lock = StackFrame(f"{LIB}/multiprocessing/synchronize.py", 95, "SemLock.__enter__")
    get = StackFrame(f"{LIB}/multiprocessing/queues.py", 100, "Queue.get")

    assert "others" == view_stack(thread(lock, get, TRAIN)).waits_for
    assert view_stack(thread(lock, TRAIN)).waits_for is None


def test_a_process_without_threads_shows_nothing() -> None:
    """There is no view of it."""
    assert [] == choose_views(dump(), "main")


@pytest.mark.parametrize(
    ("module", "function"), [("resource_tracker", "main"), ("forkserver", "main"), ("spawn", "spawn_main")]
)
def test_the_command_lines_of_multiprocessing_are_not_the_users(module: str, function: str) -> None:
    """Its helper processes have nothing to do; a worker that still starts shows no line of the program."""
    typed = StackFrame("<string>", 1, "<module>")
    helper = thread(StackFrame(f"{LIB}/multiprocessing/{module}.py", 209, function), typed)
    views = choose_views(dump(helper), "worker")

    assert [] == [line for view in views for line in view.lines]
    assert (module == "spawn") == bool(views)
