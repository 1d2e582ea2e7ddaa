"""The public Python API: open a bundle, and generate text with it. Users import it from ``tapeout``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from engines.bundle import EngineBundle
from engines.load import load as load_engine
from runtime.engine.core import EngineCore
from runtime.gateway.text.chat_template import ChatTemplate
from runtime.generate import GenerationSettings, Piece
from runtime.generate import generate as stream
from runtime.wire.limits import Limits
from runtime.wire.messages import SamplingSettings
from tapeout import artifact
from tapeout.signing import PUBLIC_KEY, key_from_environment


class TextEngine:
    """The engine of a bundle with its tokenizer, chat template and stop tokens. Close it, or use it in ``with``."""

    def __init__(self, folder: Path, *, threads: int = 0, slots: int = 1) -> None:
        self.folder = folder
        self.bundle = artifact.load(folder, EngineBundle)
        engine = load_engine(folder, threads=threads, slots=slots, public_key=key_from_environment(PUBLIC_KEY))
        self.core = EngineCore(engine, Limits())
        self.tokenizer: Tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def encode(self, prompt: str, *, system: str | None = None, raw: bool = False) -> list[int]:
        """Token ids of one user turn in the model's chat format, or of the plain text if ``raw``."""
        if raw:
            return self.tokenizer.encode(prompt).ids
        messages = [{"role": "user", "content": prompt}]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        text = ChatTemplate.load(self.folder).render(messages)
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def stream(
        self,
        prompt: Sequence[int],
        *,
        max_new_tokens: int = 256,
        stop: Sequence[str] = (),
        sampling: SamplingSettings | None = None,
    ) -> Iterator[Piece]:
        """The response to token ids, piece by piece. The bundle's own stop tokens end it."""
        stop_tokens = frozenset(self.bundle.record.stop_tokens)
        settings = GenerationSettings(max_new_tokens, stop_tokens, tuple(stop), sampling or SamplingSettings())
        return stream(self.core, self.tokenizer, prompt, settings)

    def close(self) -> None:
        self.core.close()

    def __enter__(self) -> TextEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def load(folder: Path | str, *, threads: int = 0, slots: int = 1) -> TextEngine:
    """Open a bundle. Refused if a file changed, and on hardware or libraries that it was not built for.

    With the environment variable ``TAPEOUT_PUBLIC_KEY``, a bundle without a signed PASS verdict is refused too.
    ``threads``: 0 means every physical core. ``slots``: sequences held at once.
    """
    return TextEngine(Path(folder), threads=threads, slots=slots)


def generate(
    engine: TextEngine | Path | str,
    prompt: str,
    *,
    system: str | None = None,
    raw: bool = False,
    max_new_tokens: int = 256,
    stop: Sequence[str] = (),
    sampling: SamplingSettings | None = None,
) -> str:
    """The response to one prompt. A folder is opened for this call alone.

    ``raw`` continues the plain text instead of answering in the chat format. ``sampling``: greedy unless given.
    """
    if not isinstance(engine, TextEngine):
        with load(engine) as opened:
            return generate(
                opened,
                prompt,
                system=system,
                raw=raw,
                max_new_tokens=max_new_tokens,
                stop=stop,
                sampling=sampling,
            )
    tokens = engine.encode(prompt, system=system, raw=raw)
    pieces = engine.stream(tokens, max_new_tokens=max_new_tokens, stop=stop, sampling=sampling)
    return "".join(piece.text for piece in pieces)
