"""Folders of Kimi's models as the hub has them: transformers 5.17 saves some of their tensors under other names."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import load_file, save_file

HUB = {  # what transformers writes → the hub's
    "language_model.model.blocks.": "language_model.model.layers.",
    "model.mm_projector.": "mm_projector.",
    "vision_tower.encoder.patch_embed.": "vision_tower.patch_embed.",
}
VL = {"mm_projector.proj.0.": "linear_1.", "mm_projector.proj.2.": "linear_2.", "mm_projector.": ""}
VISION = {"pos_emb_height": "init_pos_emb_height", "pos_emb_width": "init_pos_emb_width"}


def as_on_the_hub(name: str, folder: Path) -> None:
    """Rename the tensors of a saved folder, and for Kimi-VL also what its files call otherwise."""
    file, config = folder / "model.safetensors", folder / "config.json"
    tensors = {}
    for key, tensor in load_file(file).items():
        old, new = next((each for each in HUB.items() if key.startswith(each[0])), ("", ""))
        hub = new + key.removeprefix(old)
        if name == "kimi_vl" and hub.startswith("mm_projector."):
            old, new = next(each for each in VL.items() if hub.startswith(each[0]))
            hub = f"multi_modal_projector.{new}{hub.removeprefix(old)}"
        tensors[hub] = tensor
    save_file(tensors, file)
    values = json.loads(config.read_text())
    values["architectures"] = ["KimiK25ForConditionalGeneration"]
    if name == "kimi_vl":
        values |= {"architectures": ["KimiVLForConditionalGeneration"], "model_type": "kimi_vl"}
        vision = values["vision_config"].items()
        values["vision_config"] = {VISION.get(key, key): value for key, value in vision} | {"model_type": "moonvit"}
    config.write_text(json.dumps(values))
