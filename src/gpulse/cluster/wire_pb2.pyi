from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Hello(_message.Message):
    __slots__ = ("protocol", "version", "host", "machine", "boot", "instance", "pid", "node", "labels", "time_us", "monotonic_us", "runs", "shift_us", "interval_ms", "stacks", "head")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    MACHINE_FIELD_NUMBER: _ClassVar[int]
    BOOT_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    TIME_US_FIELD_NUMBER: _ClassVar[int]
    MONOTONIC_US_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    SHIFT_US_FIELD_NUMBER: _ClassVar[int]
    INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    STACKS_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    version: str
    host: str
    machine: str
    boot: str
    instance: str
    pid: int
    node: bytes
    labels: _containers.ScalarMap[str, str]
    time_us: int
    monotonic_us: int
    runs: _containers.RepeatedCompositeFieldContainer[Run]
    shift_us: int
    interval_ms: int
    stacks: bool
    head: str
    def __init__(self, protocol: _Optional[int] = ..., version: _Optional[str] = ..., host: _Optional[str] = ..., machine: _Optional[str] = ..., boot: _Optional[str] = ..., instance: _Optional[str] = ..., pid: _Optional[int] = ..., node: _Optional[bytes] = ..., labels: _Optional[_Mapping[str, str]] = ..., time_us: _Optional[int] = ..., monotonic_us: _Optional[int] = ..., runs: _Optional[_Iterable[_Union[Run, _Mapping]]] = ..., shift_us: _Optional[int] = ..., interval_ms: _Optional[int] = ..., stacks: bool = ..., head: _Optional[str] = ...) -> None: ...

class Run(_message.Message):
    __slots__ = ("id", "first_kept", "dropped", "boot", "ended_badly", "lost_at_most", "elsewhere", "dropped_elsewhere", "last", "other_head_last", "damaged")
    ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_KEPT_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    BOOT_FIELD_NUMBER: _ClassVar[int]
    ENDED_BADLY_FIELD_NUMBER: _ClassVar[int]
    LOST_AT_MOST_FIELD_NUMBER: _ClassVar[int]
    ELSEWHERE_FIELD_NUMBER: _ClassVar[int]
    DROPPED_ELSEWHERE_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    OTHER_HEAD_LAST_FIELD_NUMBER: _ClassVar[int]
    DAMAGED_FIELD_NUMBER: _ClassVar[int]
    id: bytes
    first_kept: int
    dropped: int
    boot: str
    ended_badly: bool
    lost_at_most: int
    elsewhere: int
    dropped_elsewhere: int
    last: int
    other_head_last: int
    damaged: _containers.RepeatedCompositeFieldContainer[Damage]
    def __init__(self, id: _Optional[bytes] = ..., first_kept: _Optional[int] = ..., dropped: _Optional[int] = ..., boot: _Optional[str] = ..., ended_badly: bool = ..., lost_at_most: _Optional[int] = ..., elsewhere: _Optional[int] = ..., dropped_elsewhere: _Optional[int] = ..., last: _Optional[int] = ..., other_head_last: _Optional[int] = ..., damaged: _Optional[_Iterable[_Union[Damage, _Mapping]]] = ...) -> None: ...

class Damage(_message.Message):
    __slots__ = ("first", "last", "start_us", "end_us")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    START_US_FIELD_NUMBER: _ClassVar[int]
    END_US_FIELD_NUMBER: _ClassVar[int]
    first: int
    last: int
    start_us: int
    end_us: int
    def __init__(self, first: _Optional[int] = ..., last: _Optional[int] = ..., start_us: _Optional[int] = ..., end_us: _Optional[int] = ...) -> None: ...

class Layout(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: bytes
    def __init__(self, text: _Optional[bytes] = ...) -> None: ...

class Batch(_message.Message):
    __slots__ = ("run", "first", "count", "sent_monotonic_us", "frames", "zipped")
    RUN_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    SENT_MONOTONIC_US_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    ZIPPED_FIELD_NUMBER: _ClassVar[int]
    run: bytes
    first: int
    count: int
    sent_monotonic_us: int
    frames: bytes
    zipped: bool
    def __init__(self, run: _Optional[bytes] = ..., first: _Optional[int] = ..., count: _Optional[int] = ..., sent_monotonic_us: _Optional[int] = ..., frames: _Optional[bytes] = ..., zipped: bool = ...) -> None: ...

class Goodbye(_message.Message):
    __slots__ = ("moved",)
    MOVED_FIELD_NUMBER: _ClassVar[int]
    moved: bool
    def __init__(self, moved: bool = ...) -> None: ...

class StackAnswer(_message.Message):
    __slots__ = ("id", "processes", "refusal")
    ID_FIELD_NUMBER: _ClassVar[int]
    PROCESSES_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    id: int
    processes: bytes
    refusal: str
    def __init__(self, id: _Optional[int] = ..., processes: _Optional[bytes] = ..., refusal: _Optional[str] = ...) -> None: ...

class AgentMessage(_message.Message):
    __slots__ = ("hello", "layout", "batch", "goodbye", "dropped", "stacks")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    STACKS_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    layout: Layout
    batch: Batch
    goodbye: Goodbye
    dropped: Run
    stacks: StackAnswer
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., layout: _Optional[_Union[Layout, _Mapping]] = ..., batch: _Optional[_Union[Batch, _Mapping]] = ..., goodbye: _Optional[_Union[Goodbye, _Mapping]] = ..., dropped: _Optional[_Union[Run, _Mapping]] = ..., stacks: _Optional[_Union[StackAnswer, _Mapping]] = ...) -> None: ...

class Settings(_message.Message):
    __slots__ = ("interval_ms", "bandwidth", "nvlink")
    INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    BANDWIDTH_FIELD_NUMBER: _ClassVar[int]
    NVLINK_FIELD_NUMBER: _ClassVar[int]
    interval_ms: int
    bandwidth: bool
    nvlink: bool
    def __init__(self, interval_ms: _Optional[int] = ..., bandwidth: bool = ..., nvlink: bool = ...) -> None: ...

class Durable(_message.Message):
    __slots__ = ("run", "sequence", "shift_us")
    RUN_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    SHIFT_US_FIELD_NUMBER: _ClassVar[int]
    run: bytes
    sequence: int
    shift_us: int
    def __init__(self, run: _Optional[bytes] = ..., sequence: _Optional[int] = ..., shift_us: _Optional[int] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("protocol", "version", "head", "node", "settings", "durable")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    DURABLE_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    version: str
    head: str
    node: str
    settings: Settings
    durable: _containers.RepeatedCompositeFieldContainer[Durable]
    def __init__(self, protocol: _Optional[int] = ..., version: _Optional[str] = ..., head: _Optional[str] = ..., node: _Optional[str] = ..., settings: _Optional[_Union[Settings, _Mapping]] = ..., durable: _Optional[_Iterable[_Union[Durable, _Mapping]]] = ...) -> None: ...

class StackRequest(_message.Message):
    __slots__ = ("id", "job")
    ID_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    id: int
    job: str
    def __init__(self, id: _Optional[int] = ..., job: _Optional[str] = ...) -> None: ...

class HeadMessage(_message.Message):
    __slots__ = ("welcome", "durable", "settings", "warning", "stacks")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    DURABLE_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    WARNING_FIELD_NUMBER: _ClassVar[int]
    STACKS_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    durable: Durable
    settings: Settings
    warning: str
    stacks: StackRequest
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., durable: _Optional[_Union[Durable, _Mapping]] = ..., settings: _Optional[_Union[Settings, _Mapping]] = ..., warning: _Optional[str] = ..., stacks: _Optional[_Union[StackRequest, _Mapping]] = ...) -> None: ...

class Request(_message.Message):
    __slots__ = ("operation", "body")
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    operation: str
    body: bytes
    def __init__(self, operation: _Optional[str] = ..., body: _Optional[bytes] = ...) -> None: ...

class Reply(_message.Message):
    __slots__ = ("status", "body")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    status: int
    body: bytes
    def __init__(self, status: _Optional[int] = ..., body: _Optional[bytes] = ...) -> None: ...
