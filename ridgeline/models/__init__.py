"""The architectures, by the names that config.json gives them. A new one is one file and one line here."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from ridgeline.core.errors import ModelLoadError
from ridgeline.core.registry import Registry
from ridgeline.models.config import Architecture, Config, ModelConfig, checkpoint_dtype, sampling_defaults, token_ids
from ridgeline.models.encoder_decoder import started
from ridgeline.models.sequence_classifiers import Classifier

ARCHITECTURES = Registry(
    "architecture",
    {
        "WhisperForConditionalGeneration": "ridgeline.models.whisper:Whisper",
        "LlamaForCausalLM": "ridgeline.models.llama:Llama",
        "Qwen2VLForConditionalGeneration": "ridgeline.models.qwen_vl:Qwen2VL",
        "Qwen2_5_VLForConditionalGeneration": "ridgeline.models.qwen_vl:Qwen2_5VL",
        "Qwen3VLForConditionalGeneration": "ridgeline.models.qwen_vl:Qwen3VL",
        "Qwen3VLMoeForConditionalGeneration": "ridgeline.models.qwen_vl:Qwen3VLMoe",
        "Glm4vForConditionalGeneration": "ridgeline.models.glm4v:Glm4vVision",
        "Glm4vMoeForConditionalGeneration": "ridgeline.models.glm4v:Glm4vMoeVision",
        "Idefics3ForConditionalGeneration": "ridgeline.models.idefics3:Idefics3Vision",
        "LlavaNextForConditionalGeneration": "ridgeline.models.llava:LlavaNext",
        "LlavaOnevisionForConditionalGeneration": "ridgeline.models.llava:LlavaOnevision",
        "PaliGemmaForConditionalGeneration": "ridgeline.models.paligemma:PaliGemma",
        "LlavaForConditionalGeneration": "ridgeline.models.llava:Llava",
        "PaddleOCRVLForConditionalGeneration": "ridgeline.models.paddleocr_vl:PaddleOCRVL",
        "Qwen2AudioForConditionalGeneration": "ridgeline.models.qwen2_audio:Qwen2Audio",
        "Qwen2_5OmniForConditionalGeneration": "ridgeline.models.qwen_omni:Qwen2_5Omni",
        "Qwen2_5OmniModel": "ridgeline.models.qwen_omni:Qwen2_5OmniModel",
        "Qwen3OmniMoeForConditionalGeneration": "ridgeline.models.qwen_omni:Qwen3Omni",
        "Qwen3OmniMoeThinkerForConditionalGeneration": "ridgeline.models.qwen_omni:Qwen3OmniThinker",
        "Qwen2_5OmniThinkerForConditionalGeneration": "ridgeline.models.qwen_omni:Qwen2_5OmniThinker",
        "MllamaForConditionalGeneration": "ridgeline.models.mllama:LlamaVision",
        "MiniCPMV4_6ForConditionalGeneration": "ridgeline.models.minicpm_v:MiniCPMV",
        "Blip2ForConditionalGeneration": "ridgeline.models.blip2:Blip2",
        "DeepseekOCRForCausalLM": "ridgeline.models.deepseek_ocr:DeepseekOcr",
        "DeepseekOcr2ForConditionalGeneration": "ridgeline.models.deepseek_ocr:DeepseekOcr2",
        "InstructBlipForConditionalGeneration": "ridgeline.models.instructblip:InstructBlip",
        "ChameleonForConditionalGeneration": "ridgeline.models.chameleon:Chameleon",
        "MistralForCausalLM": "ridgeline.models.mistral:Mistral",
        "Qwen3ForCausalLM": "ridgeline.models.qwen3:Qwen3",
        "GemmaForCausalLM": "ridgeline.models.gemma:Gemma",
        "Gemma3ForConditionalGeneration": "ridgeline.models.gemma:Gemma3Multimodal",
        "InternVLForConditionalGeneration": "ridgeline.models.internvl:InternVL3",
        "Mistral3ForConditionalGeneration": "ridgeline.models.mistral:Mistral3Multimodal",
        "ApertusForCausalLM": "ridgeline.models.apertus:Apertus",
        "ArceeForCausalLM": "ridgeline.models.arcee:Arcee",
        "SeedOssForCausalLM": "ridgeline.models.seed_oss:SeedOss",
        "InternLM3ForCausalLM": "ridgeline.models.internlm3:InternLM3",
        "Ernie4_5ForCausalLM": "ridgeline.models.ernie:Ernie",
        "Ernie4_5_MoeForCausalLM": "ridgeline.models.ernie:ErnieMoe",
        "CohereForCausalLM": "ridgeline.models.cohere:Cohere",
        "Cohere2ForCausalLM": "ridgeline.models.cohere:Cohere2",
        "GlmForCausalLM": "ridgeline.models.glm4:Glm",
        "Glm4ForCausalLM": "ridgeline.models.glm4:Glm4",
        "Exaone4ForCausalLM": "ridgeline.models.exaone4:Exaone4",
        "ExaoneMoeForCausalLM": "ridgeline.models.exaone4:ExaoneMoe",
        "Starcoder2ForCausalLM": "ridgeline.models.starcoder2:Starcoder2",
        "StableLmForCausalLM": "ridgeline.models.stablelm:StableLm",
        "PhiForCausalLM": "ridgeline.models.phi:Phi",
        "GPTJForCausalLM": "ridgeline.models.gptj:GPTJ",
        "OPTForCausalLM": "ridgeline.models.opt:OPT",
        "FalconForCausalLM": "ridgeline.models.falcon:Falcon",
        "MptForCausalLM": "ridgeline.models.mpt:MPT",
        "OlmoForCausalLM": "ridgeline.models.olmo:Olmo",
        "Olmo3ForCausalLM": "ridgeline.models.olmo2:Olmo3",
        "MinistralForCausalLM": "ridgeline.models.mistral:Ministral",
        "Ministral3ForCausalLM": "ridgeline.models.mistral:Ministral3",
        "Mistral4ForCausalLM": "ridgeline.models.mistral4:Mistral4",
        "HunYuanDenseV1ForCausalLM": "ridgeline.models.hunyuan:HunyuanDense",
        "HunYuanMoEV1ForCausalLM": "ridgeline.models.hunyuan:HunyuanMoe",
        "KimiK25ForConditionalGeneration": "ridgeline.models.kimi_vl:KimiK25",
        "KimiVLForConditionalGeneration": "ridgeline.models.kimi_vl:KimiVL",
        "DeciLMForCausalLM": "ridgeline.models.decilm:DeciLM",
        "Dots1ForCausalLM": "ridgeline.models.dots1:Dots1",
        "Qwen3MoeForCausalLM": "ridgeline.models.qwen3_moe:Qwen3Moe",
        "GPT2LMHeadModel": "ridgeline.models.gpt2:GPT2",
        "Qwen2ForCausalLM": "ridgeline.models.qwen2:Qwen2",
        "Gemma2ForCausalLM": "ridgeline.models.gemma:Gemma2",
        "Gemma3ForCausalLM": "ridgeline.models.gemma:Gemma3",
        "Gemma3nForCausalLM": "ridgeline.models.gemma3n:Gemma3n",
        "Gemma3nForConditionalGeneration": "ridgeline.models.gemma3n:Gemma3nMultimodal",
        "Gemma4ForCausalLM": "ridgeline.models.gemma4:Gemma4",
        "Gemma4ForConditionalGeneration": "ridgeline.models.gemma4:Gemma4Multimodal",
        "GptOssForCausalLM": "ridgeline.models.gpt_oss:GptOss",
        "Phi3ForCausalLM": "ridgeline.models.phi3:Phi3",
        "Phi4MultimodalForCausalLM": "ridgeline.models.phi4_multimodal:Phi4Multimodal",
        "PhiMoEForCausalLM": "ridgeline.models.phimoe:Phimoe",
        "Olmo2ForCausalLM": "ridgeline.models.olmo2:Olmo2",
        "SmolLM3ForCausalLM": "ridgeline.models.smollm3:SmolLM3",
        "GPTNeoXForCausalLM": "ridgeline.models.gpt_neox:GPTNeoX",
        "GraniteForCausalLM": "ridgeline.models.granite:Granite",
        "BloomForCausalLM": "ridgeline.models.bloom:Bloom",
        "MixtralForCausalLM": "ridgeline.models.mixtral:Mixtral",
        "Qwen2MoeForCausalLM": "ridgeline.models.qwen2_moe:Qwen2Moe",
        "DeepseekForCausalLM": "ridgeline.models.deepseek:Deepseek",
        "DeepseekV2ForCausalLM": "ridgeline.models.deepseek_mla:DeepseekV2",
        "DeepseekV3ForCausalLM": "ridgeline.models.deepseek_mla:DeepseekV3",
        "DeepseekV32ForCausalLM": "ridgeline.models.deepseek_v32:DeepseekV32",
        "Glm4MoeLiteForCausalLM": "ridgeline.models.glm4_moe_lite:Glm4MoeLite",
        "GlmMoeDsaForCausalLM": "ridgeline.models.glm_moe_dsa:GlmMoeDsa",
        "YoutuForCausalLM": "ridgeline.models.youtu:Youtu",
        "MiniCPM3ForCausalLM": "ridgeline.models.minicpm3:MiniCPM3",
        "KimiLinearForCausalLM": "ridgeline.models.kimi_linear:KimiLinear",
        "OlmoeForCausalLM": "ridgeline.models.olmoe:Olmoe",
        "GraniteMoeForCausalLM": "ridgeline.models.granite_moe:GraniteMoe",
        "GraniteMoeSharedForCausalLM": "ridgeline.models.granite_moe:GraniteMoeShared",
        "Glm4MoeForCausalLM": "ridgeline.models.glm4_moe:Glm4Moe",
        "MiniMaxM2ForCausalLM": "ridgeline.models.minimax_m2:MiniMaxM2",
        "MiniMaxM1ForCausalLM": "ridgeline.models.minimax:MiniMax",
        "MiMoV2FlashForCausalLM": "ridgeline.models.mimo_v2:MiMoV2",
        "Step3p5ForCausalLM": "ridgeline.models.step3p5:Step3p5",
        "Step3p7ForConditionalGeneration": "ridgeline.models.step3p5:Step3p7Multimodal",
        "Llama4ForCausalLM": "ridgeline.models.llama4:Llama4",
        "Llama4ForConditionalGeneration": "ridgeline.models.llama4:Llama4Multimodal",
        "LongcatFlashForCausalLM": "ridgeline.models.longcat:LongCat",
        "Qwen3NextForCausalLM": "ridgeline.models.qwen3_next:Qwen3Next",
        "Qwen3_5ForCausalLM": "ridgeline.models.qwen3_5:Qwen3_5",
        "Qwen3_5MoeForCausalLM": "ridgeline.models.qwen3_5:Qwen3_5Moe",
        "Qwen3_5ForConditionalGeneration": "ridgeline.models.qwen3_5:Qwen3_5Multimodal",
        "Qwen3_5MoeForConditionalGeneration": "ridgeline.models.qwen3_5:Qwen3_5MoeMultimodal",
        "Lfm2ForCausalLM": "ridgeline.models.lfm2:Lfm2",
        "Lfm2MoeForCausalLM": "ridgeline.models.lfm2_moe:Lfm2Moe",
        "FalconH1ForCausalLM": "ridgeline.models.falcon_h1:FalconH1",
        "MambaForCausalLM": "ridgeline.models.mamba:Mamba",
        "FalconMambaForCausalLM": "ridgeline.models.mamba:FalconMamba",
        "Mamba2ForCausalLM": "ridgeline.models.mamba2:Mamba2",
        "BambaForCausalLM": "ridgeline.models.bamba:Bamba",
        "GraniteMoeHybridForCausalLM": "ridgeline.models.granite_hybrid:GraniteMoeHybrid",
        "NemotronHForCausalLM": "ridgeline.models.nemotron_h:NemotronH",
        "JambaForCausalLM": "ridgeline.models.jamba:Jamba",
        "Zamba2ForCausalLM": "ridgeline.models.zamba2:Zamba2",
        "RwkvForCausalLM": "ridgeline.models.rwkv:Rwkv",
        "GatedLinearAttentionForCausalLM": "ridgeline.models.gla:GatedLinearAttention",
        "RetNetForCausalLM": "ridgeline.models.gla:RetNet",
        "T5ForConditionalGeneration": "ridgeline.models.t5:T5",
        "UMT5ForConditionalGeneration": "ridgeline.models.t5:UMT5",
        "T5EncoderModel": "ridgeline.models.t5:T5Encoder",
        "UMT5EncoderModel": "ridgeline.models.t5:UMT5Encoder",
        "PegasusForConditionalGeneration": "ridgeline.models.pegasus:Pegasus",
        "MarianMTModel": "ridgeline.models.marian:Marian",
        "M2M100ForConditionalGeneration": "ridgeline.models.m2m100:M2M100",
        "BartForConditionalGeneration": "ridgeline.models.bart:Bart",
        "MBartForConditionalGeneration": "ridgeline.models.bart:MBart",
        "CLIPModel": "ridgeline.models.contrastive:ClipEmbedder",
        "SiglipModel": "ridgeline.models.contrastive:SiglipEmbedder",
        "Siglip2Model": "ridgeline.models.contrastive:Siglip2Embedder",
        "BertModel": "ridgeline.models.bert:Bert",
        "BertForSequenceClassification": "ridgeline.models.bert:BertClassifier",
        "RobertaModel": "ridgeline.models.roberta:Roberta",
        "RobertaForSequenceClassification": "ridgeline.models.roberta:RobertaClassifier",
        "DistilBertModel": "ridgeline.models.distilbert:DistilBert",
        "DistilBertForSequenceClassification": "ridgeline.models.distilbert:DistilBertClassifier",
        "ElectraModel": "ridgeline.models.electra:Electra",
        "ElectraForSequenceClassification": "ridgeline.models.electra:ElectraClassifier",
        "AlbertModel": "ridgeline.models.albert:Albert",
        "AlbertForSequenceClassification": "ridgeline.models.albert:AlbertClassifier",
        "MPNetModel": "ridgeline.models.mpnet:MPNet",
        "MPNetForSequenceClassification": "ridgeline.models.mpnet:MPNetClassifier",
        "NomicBertModel": "ridgeline.models.nomic_bert:NomicBert",
        "NomicBertForSequenceClassification": "ridgeline.models.nomic_bert:NomicBertClassifier",
        "JinaEmbeddingsV3Model": "ridgeline.models.jina_v3:JinaV3",
        "JinaEmbeddingsV3ForSequenceClassification": "ridgeline.models.jina_v3:JinaV3Classifier",
        "Qwen2ForRewardModel": "ridgeline.models.reward:Qwen2Reward",
        "Qwen2ForProcessRewardModel": "ridgeline.models.reward:Qwen2ProcessReward",
        "HF_ColBERT": "ridgeline.models.colbert:ColBert",
        "DebertaV2Model": "ridgeline.models.deberta_v2:DebertaV2",
        "DebertaV2ForSequenceClassification": "ridgeline.models.deberta_v2:DebertaV2Classifier",
        "NewModel": "ridgeline.models.gte:Gte",
        "NewForSequenceClassification": "ridgeline.models.gte:GteClassifier",
        "ModernBertModel": "ridgeline.models.modernbert:ModernBert",
        "ModernBertForSequenceClassification": "ridgeline.models.modernbert:ModernBertClassifier",
    },
)


# Other names of these networks, or of their parts that embed
SAME = {
    "Gemma3TextForCausalLM": "Gemma3ForCausalLM",
    "GPT2ForCausalLM": "GPT2LMHeadModel",
    "BertForMaskedLM": "BertModel",
    "BertSpladeSparseEmbeddingModel": "BertModel",
    "RobertaForMaskedLM": "RobertaModel",
    "XLMRobertaModel": "RobertaModel",
    "XLMRobertaForMaskedLM": "RobertaModel",
    "XLMRobertaForSequenceClassification": "RobertaForSequenceClassification",
    "ModernBertForMaskedLM": "ModernBertModel",
    "ColBERTModernBertModel": "ModernBertModel",
    "DebertaV2ForMaskedLM": "DebertaV2Model",
    "GteModel": "NewModel",
    "NewForMaskedLM": "NewModel",
    "DistilBertForMaskedLM": "DistilBertModel",
    "ElectraForPreTraining": "ElectraModel",
    "ElectraForMaskedLM": "ElectraModel",
    "AlbertForMaskedLM": "AlbertModel",
    "AlbertForPreTraining": "AlbertModel",
    "MPNetForMaskedLM": "MPNetModel",
    "NomicBertForMaskedLM": "NomicBertModel",
    "JinaEmbeddingsV3ForMaskedLM": "JinaEmbeddingsV3Model",
    "Ernie4_5_MoEForCausalLM": "Ernie4_5_MoeForCausalLM",
    "StableLMEpochForCausalLM": "StableLmForCausalLM",
    "MPTForCausalLM": "MptForCausalLM",
    "Kimi_K25ForConditionalGeneration": "KimiK25ForConditionalGeneration",
    "NemotronNASForCausalLM": "DeciLMForCausalLM",
    "MiniMaxForCausalLM": "MiniMaxM1ForCausalLM",
    "MiniMaxText01ForCausalLM": "MiniMaxM1ForCausalLM",
    "PhimoeForCausalLM": "PhiMoEForCausalLM",
    "MT5ForConditionalGeneration": "T5ForConditionalGeneration",
    "MT5EncoderModel": "T5EncoderModel",
    "SmolVLMForConditionalGeneration": "Idefics3ForConditionalGeneration",
    "RWForCausalLM": "FalconForCausalLM",
}


# What has no way to run here, through transformers' modules either, and why
REFUSED = {
    "PegasusXForConditionalGeneration": "its encoder attends within blocks and to global tokens",
    "NllbMoeForConditionalGeneration": "its encoder has mixtures of experts, with a bound on each expert's tokens",
    "DeepseekOCR2ForCausalLM": "its files are not in transformers' form; those of DeepseekOcr2 are",
    **dict.fromkeys(("MiniCPMV", "MiniCPMO"), "its pictures become tokens by learned queries; MiniCPM-V 4.6 runs"),
    "InternVLChatModel": "its files are not in transformers' form; the folder of the same name with -hf is",
    "MiniMaxM3SparseForConditionalGeneration": "its layers attend to blocks of tokens that an indexer chooses",
    "Qwen4ExpForConditionalGeneration": "its layers attend to tokens that an indexer chooses, and add n-grams' vectors",
}

CLASSIFIES = "ForSequenceClassification"


def architecture_of(config: Mapping[str, Any]) -> Architecture:
    """Return the architecture that config.json names. Raise ModelLoadError if we know none of its names."""
    if (found := _architecture(config)) is not None:
        return found
    if (name := _refused(config)) is not None:
        raise ModelLoadError(f"{name} does not run here: {REFUSED[name]}. `ridgeline models` lists those that do.")
    raise ModelLoadError(
        f"config.json names the architectures {config.get('architectures')!r}, none of which we know; "
        "`ridgeline models` lists those we do."
    )


def known(config: Mapping[str, Any]) -> bool:
    """Return True if config.json names an architecture of ours, or one that can run in no way."""
    return _architecture(config) is not None or _refused(config) is not None


def _refused(config: Mapping[str, Any]) -> str | None:
    names = config.get("architectures")
    return next((name for name in REFUSED if isinstance(names, list) and name in names), None)


def _architecture(config: Mapping[str, Any]) -> Architecture | None:
    names = config.get("architectures")
    for name in names if isinstance(names, list) else ():
        if isinstance(name, str) and SAME.get(name, name) in ARCHITECTURES:
            ours: Architecture = ARCHITECTURES[SAME.get(name, name)]
            return ours
        if isinstance(name, str) and (decoder := decoder_of(name)) is not None:
            found: Architecture = ARCHITECTURES[decoder]
            return Classifier(name, found) if name.endswith(CLASSIFIES) else found
    return None


def decoder_of(name: str) -> str | None:
    """Return the decoder that an architecture consists of which was saved without its output layer, alone or with a map
    to labels; None for other architectures."""
    if SAME.get(name, name) in ARCHITECTURES:
        return None
    for ending in (CLASSIFIES, "Model"):
        decoder = name.removesuffix(ending) + "ForCausalLM"
        if name.endswith(ending) and (decoder := SAME.get(decoder, decoder)) in ARCHITECTURES:
            return decoder
    return None


def descriptions() -> dict[str, tuple[str, str]]:
    """Return architecture → (the families that name it, what they are), from the first sentences of their files."""
    found = {}
    for name in sorted(ARCHITECTURES):
        text = sys.modules[ARCHITECTURES[name].__module__].__doc__ or ""
        families, _, what = text.partition(". ")[0].partition("\n\n")[0].partition(": ")
        found[name] = families, what.rstrip(".")
    return found


def model_config(config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
    """Return config.json and generation_config.json as a `ModelConfig`. The second wins if both name end-of-sequence
    ids."""
    text = config.get("text_config")  # of a multimodal checkpoint
    base, generate = Config(config, text if isinstance(text, Mapping) else None), Config(generation or {})
    architecture = architecture_of(config)
    spec = started(architecture.spec(config), base, generate)
    eos_ids = token_ids(generate, "eos_token_id") or token_ids(base, "eos_token_id")
    return ModelConfig(
        spec=spec,
        weights=architecture.weights(spec),
        dtype=checkpoint_dtype(base),
        bos_token_id=next(iter(token_ids(base, "bos_token_id")), None),
        eos_token_ids=tuple(i for i in eos_ids if i < spec.vocab_size),  # other ids can never come
        sampling_defaults=sampling_defaults(generate),
    )
