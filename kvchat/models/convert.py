"""GGUF to safetensors, once. transformers needs half a minute to open a GGUF file, and under a second afterwards."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import shutil
import tempfile
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from filelock import FileLock

from kvchat import places
from kvchat.errors import KVChatError, ModelRefused


def convert_gguf(gguf: Path, target: Path, recall: bool = False) -> None:
    """Write the model and tokenizer of a GGUF file to the folder `target`, float32 safetensors; whole or not at all.

    recall: merge kvchat's recall adapter (only for the model it was trained on).
    Raises ModelRefused for an architecture that transformers cannot read from GGUF, KVChatError where nothing can be written.
    """
    places.make(target.parent)
    with FileLock(target.with_name(f".{target.name}.lock")):
        if (target / "config.json").is_file():
            return  # another process was faster
        work = Path(tempfile.mkdtemp(dir=target.parent, prefix=".convert-"))
        try:
            _convert(gguf, work, recall)
            shutil.rmtree(target, ignore_errors=True)
            os.replace(work, target)
        except OSError as error:
            raise KVChatError(
                f"the converted model cannot be written: {error}; free some space and try again"
            ) from None
        finally:
            shutil.rmtree(work, ignore_errors=True)


def _convert(gguf: Path, target: Path, recall: bool) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    try:
        # the reader's progress bar heeds no switch of transformers'
        with contextlib.redirect_stderr(io.StringIO()):
            opened = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
            tokenizer = AutoTokenizer.from_pretrained(**source)
    except (ValueError, KeyError, RuntimeError, NotImplementedError) as error:
        line = (str(error).splitlines() or ["no reason given"])[0]
        raise ModelRefused(f"{gguf.name} cannot be opened as GGUF ({line}); take another file") from None
    config = copy.deepcopy(opened.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # the weights are de-quantized now
    with torch.device("meta"):
        model = type(opened)(config)
    model.load_state_dict(opened.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = opened.generation_config
    if recall:
        _merge_recall(model)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def _merge_recall(model: Any) -> None:
    """W' = W + B A for every adapted matrix, with the adapter's RoPE base and context (recall.json)."""
    import torch
    from safetensors.torch import load_file

    settings = json.loads((files("kvchat.models") / "recall.json").read_text("utf-8"))
    with as_file(files("kvchat.models") / "recall.safetensors") as file:
        tensors = load_file(file)
    modules = dict(model.named_modules())
    names = sorted({key.rsplit(".", 2)[0] for key in tensors})
    with torch.no_grad():
        for name in names:
            a = tensors[f"{name}.lora_A.codes"] * tensors[f"{name}.lora_A.scale"].float()[:, None]
            b = tensors[f"{name}.lora_B.codes"] * tensors[f"{name}.lora_B.scale"].float()
            modules[name].weight += b @ a
    model.config.rope_parameters = {"rope_type": "default", "rope_theta": settings["rope_theta"]}
    model.config.max_position_embeddings = settings["max_position_embeddings"]
