"""Named random streams, all derived from one secret: one per purpose and candidate.

Streams are derived with HMAC-SHA256, so that no stream tells anything about another, and a stream
does not depend on how candidates are stacked or in which order streams are opened.

``torch.Generator.manual_seed`` keeps only 32 bits of a seed on CPU (seeds 1 and ``1 + 2**32`` give
the same numbers): an adversary could try all of them and subtract the noise. So the whole state of
the generator, 19,968 bits, is derived from the 256-bit key instead.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
import threading
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from privtune.errors import InvalidInputError

if TYPE_CHECKING:
    import torch

GLOBAL_GENERATOR = threading.RLock()
"""Held by whoever seeds, forks or puts back torch's global generator, of which a process has one: a
trial in another thread would draw its first weights from what is left of it."""

Tensors: TypeAlias = "dict[str, torch.Tensor]"
"""Where something is, by name: what a checkpoint keeps of it."""

_DOMAIN = b"privtune.stream.v1"
_WORDS = 624  # state words of the Mersenne Twister


def seed_global_generator(seed: int) -> None:
    """Seed torch's global generator on every device that this machine has.

    Without an accelerator only the generator of the CPU: ``torch.manual_seed`` would note the call, with a
    text of the whole stack, for each kind of accelerator that may be initialised later.

    Args:
        seed: As ``torch.manual_seed`` takes it.
    """
    import torch

    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


class Streams:
    """Independent random streams, by name and candidate.

    The secret is 32 bytes, fresh ones from the operating system unless given. Whoever knows it can
    recompute the noise: it must stay sealed.

    **Guarantee**: streams of different names, candidates or secrets are independent as far as
    HMAC-SHA256 is a pseudorandom function.
    """

    __slots__ = ("_secret",)

    def __init__(self, secret: bytes | None = None) -> None:
        secret = secrets.token_bytes(32) if secret is None else secret
        if len(secret) != 32:
            raise InvalidInputError("secret", f"{len(secret)} bytes", "must be 32 bytes long")
        self._secret = bytes(secret)

    def __repr__(self) -> str:
        return "Streams(<sealed>)"

    def key(self, name: str, candidate: int = 0) -> bytes:
        """Return the 32-byte key of one stream.

        Args:
            name: The purpose of the stream, without bytes of 0.
            candidate: Its number in the study, at least 0.
        """
        parts = (_DOMAIN, name.encode(), str(int(candidate)).encode())
        # Bytes of 0 between them: else a name that ends in a digit would run into the number.
        message = b"\0".join(parts)
        return hmac.new(self._secret, message, hashlib.sha256).digest()

    def seed(self, name: str, candidate: int = 0) -> int:
        """Return a 63-bit seed from a stream's key, for generators that take an integer seed."""
        first = self.key(name, candidate)[:8]
        return int.from_bytes(first, "little") >> 1

    def numpy(self, name: str, candidate: int = 0) -> np.random.Generator:
        """Return a NumPy generator seeded with all 256 bits of the stream's key."""
        return np.random.Generator(np.random.SFC64(int.from_bytes(self.key(name, candidate))))

    def generator(
        self,
        name: str,
        candidate: int = 0,
        *,
        device: torch.device | str = "cpu",
    ) -> torch.Generator:
        """Return a torch generator with its whole state derived from the key; on CUDA it has only 64 bits.

        Args:
            name: The purpose of the stream.
            candidate: Its number in the study.
            device: Where the generator draws.
        """
        import torch

        key = self.key(name, candidate)
        generator = torch.Generator(device=device)
        if torch.device(device).type != "cpu":
            seed = int.from_bytes(key[:8], "little", signed=True)
            return generator.manual_seed(seed)
        digest = hashlib.shake_256(key).digest(4 * _WORDS)
        words = np.frombuffer(digest, dtype="<u4")
        # Layout of at::CPUGeneratorImplStateLegacy: seed u64, left i32, seeded i32, next u64,
        # the words as u64, then the cache of a second normal draw, empty here.
        state = bytearray(generator.get_state().numpy().tobytes())
        struct.pack_into("<QiiQ", state, 0, 0, 1, 1, 0)
        state[24 : 24 + 8 * _WORDS] = words.astype("<u8").tobytes()
        numbers = torch.frombuffer(state, dtype=torch.uint8)
        generator.set_state(numbers.clone())
        return generator


def state_of(rng: np.random.Generator) -> torch.Tensor:
    """Return the whole state of a stream's NumPy generator as an int64 tensor."""
    import torch

    state = rng.bit_generator.state
    words = state["state"]["state"].tolist()
    words.append(state["has_uint32"])
    words.append(state["uinteger"])
    numbers = np.array(words, dtype=np.uint64)
    # torch has no unsigned integers of 64 bits; the bits are the same.
    return torch.from_numpy(numbers.view(np.int64))


def set_state(rng: np.random.Generator, state: torch.Tensor) -> None:
    """Set a stream's NumPy generator to a state that ``state_of`` returned."""
    *words, has, spare = state.numpy().view(np.uint64)
    rng.bit_generator.state = {
        "bit_generator": "SFC64",
        "state": {"state": np.array(words, dtype=np.uint64)},
        "has_uint32": int(has),
        "uinteger": int(spare),
    }


def prefixed(prefix: str, tensors: Tensors) -> Tensors:
    """Return the tensors with ``prefix`` and a dot before their names."""
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}


def of_prefix(prefix: str, tensors: Tensors) -> Tensors:
    """Return the tensors whose names begin with ``prefix`` and a dot, without that beginning."""
    start = f"{prefix}."
    parts: Tensors = {}
    for name, tensor in tensors.items():
        if name.startswith(start):
            parts[name.removeprefix(start)] = tensor
    return parts
