from tests.test_oracle import *
import pytest
import tests.test_oracle as o
F = ["mamba","falcon_mamba","mamba2","bamba","granite_hybrid","granite_hybrid_moe","nemotron_h","nemotron_h_moe"]
for name in [n for n in list(globals()) if n.startswith("test_")]:
    del globals()[name]
@pytest.mark.parametrize("family", F)
def test_pre(family, open_llm, tiny_model):
    o.test_preemption_changes_nothing(family, "fcfs", open_llm, tiny_model)
@pytest.mark.parametrize("family", F)
def test_conv(family, open_llm):
    o.test_a_conversation_that_goes_on_from_within_a_block_is_transformers(family, open_llm)
@pytest.mark.parametrize("family", F)
def test_long(family, open_llm, tiny_model):
    o.test_a_long_life_of_shared_prefixes_and_salts_changes_nothing(family, open_llm, tiny_model)
@pytest.mark.parametrize("family", F)
@pytest.mark.parametrize("i", [0, 3, 5, 8])
def test_settings(family, i, open_llm, tiny_model):
    o.test_settings_and_neighbours_change_nothing(family, o.SETTINGS[i], open_llm, tiny_model)
