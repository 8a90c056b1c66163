"""Citizenship: the field's own training libraries run a routed model, and what they save loads."""

from types import MethodType

import pytest
import torch
from transformers import Trainer, TrainingArguments, set_seed

import depthroute as dr
from tests.support import (
    METHODS,
    llama_config,
    plain_model,
    routed_model,
    tokens,
    trained_like,
    word_tokenizer,
)

ROUTING = dr.RoutingConfig("delta", num_blocks=3)
STEPS = 12


@pytest.fixture(autouse=True)
def _no_shared_accelerator():
    """Accelerate keeps its mixed-precision choice for the whole process; start each test anew."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


class Repeating(torch.utils.data.Dataset):
    """Sequences with a pattern that a small model learns in a few steps."""

    def __init__(self, count=32, length=24):
        start = tokens(batch=count, length=1)
        self.ids = 3 + (start + 5 * torch.arange(length)) % 90

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def converted():
    set_seed(0)
    from transformers import LlamaForCausalLM

    return dr.convert(LlamaForCausalLM(llama_config()), ROUTING)


def arguments(folder, **kwargs):
    defaults = {
        "output_dir": str(folder),
        "max_steps": STEPS,
        "per_device_train_batch_size": 8,
        "learning_rate": 5e-3,
        "logging_steps": 1,
        "save_steps": STEPS,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    return defaults | kwargs


def losses(trainer):
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def assert_fell(values, by=0.2):
    assert len(values) >= 4
    assert sum(values[-2:]) / 2 < sum(values[:2]) / 2 - by, values


def assert_loads_equal(folder, model):
    loaded = dr.from_pretrained(folder).eval()
    assert torch.equal(loaded(tokens()).logits, model.eval()(tokens()).logits)


@pytest.mark.parametrize("checkpointing", [None, False, True])
def test_hugging_face_trainer_with_routing_groups(tmp_path, checkpointing):
    """With gradient checkpointing off, non-reentrant and reentrant."""
    model = converted()
    extra = {}
    if checkpointing is not None:
        extra = {
            "gradient_checkpointing": True,
            "gradient_checkpointing_kwargs": {"use_reentrant": checkpointing},
        }
    groups = dr.parameter_groups(model, lr=5e-3, routing_lr=5e-2)
    optimiser = torch.optim.AdamW(groups)
    trainer = Trainer(
        model=model,
        args=TrainingArguments(**arguments(tmp_path, **extra)),
        train_dataset=Repeating(),
        optimizers=(optimiser, None),
    )
    trainer.train()
    assert_fell(losses(trainer))
    assert any(site.query.abs().max() > 1e-4 for site in model.sites.values())
    assert_loads_equal(tmp_path / f"checkpoint-{STEPS}", model)


def test_hugging_face_trainer_smooths_labels_of_the_next_token(tmp_path):
    """It shifts them for classes that it knows by name."""
    plain = plain_model()
    routed = dr.convert(plain, dr.RoutingConfig("standard"))
    batch = {"input_ids": tokens(), "labels": tokens()}
    options = TrainingArguments(**arguments(tmp_path, label_smoothing_factor=0.1))
    losses = [Trainer(model, options).compute_loss(model, dict(batch)) for model in (plain, routed)]
    assert torch.equal(*losses)


def test_what_mixed_precision_left_on_a_model_is_not_taken_for_the_other_kind(tmp_path):
    """Trainer puts a forward on the model itself, which goes on calling the class of before."""
    routed = converted()
    Trainer(
        model=routed,
        args=TrainingArguments(**arguments(tmp_path, bf16=True, max_steps=2, save_steps=99)),
        train_dataset=Repeating(),
    ).train()
    plain = plain_model()
    plain.forward = MethodType(type(plain).forward, plain)
    for change, model in ((dr.revert, routed), (lambda m: dr.convert(m, ROUTING), plain)):
        with pytest.raises(dr.ConfigError, match=r"forward of its own.*goes with `del model\.forw"):
            change(model)
        del model.forward
        assert "forward" not in vars(change(model))


def test_hugging_face_trainer_resumes_from_its_checkpoint(tmp_path):
    options = arguments(tmp_path, max_steps=STEPS, save_steps=STEPS // 2)
    straight = Trainer(
        model=converted(), args=TrainingArguments(**options), train_dataset=Repeating()
    )
    straight.train()
    resumed = Trainer(
        model=converted(), args=TrainingArguments(**options), train_dataset=Repeating()
    )
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{STEPS // 2}"))
    for a, b in zip(straight.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def test_trl_sft_trainer(tmp_path):
    datasets = pytest.importorskip("datasets")
    trl = pytest.importorskip("trl")
    tokenizer = word_tokenizer()
    texts = [" ".join(f"w{(s + 3 * i) % 90}" for i in range(20)) for s in range(32)]
    model = converted()
    trainer = trl.SFTTrainer(
        model=model,
        args=trl.SFTConfig(**arguments(tmp_path, max_length=32, bf16=False)),
        train_dataset=datasets.Dataset.from_dict({"text": texts}),
        processing_class=tokenizer,
    )
    trainer.train()
    assert_fell(losses(trainer))
    assert_loads_equal(tmp_path / f"checkpoint-{STEPS}", model)


def test_peft_lora_on_the_base_with_routing_trained_in_full(tmp_path):
    peft = pytest.importorskip("peft")
    model = converted()
    config = peft.LoraConfig(
        r=4,
        target_modules=["q_proj", "v_proj"],
        modules_to_save=["routing"],
        task_type="CAUSAL_LM",
    )
    wrapped = peft.get_peft_model(model, config)
    trainable = {n for n, p in wrapped.named_parameters() if p.requires_grad}
    assert any("routing" in n for n in trainable)
    assert all("lora" in n or "routing" in n for n in trainable)
    trainer = Trainer(
        model=wrapped,
        args=TrainingArguments(**arguments(tmp_path, learning_rate=3e-2, max_steps=20)),
        train_dataset=Repeating(),
    )
    trainer.train()
    assert_fell(losses(trainer), by=0.05)  # rank 4 on a random base learns little
    assert all(site.query.abs().max() > 1e-4 for site in wrapped.sites.values())  # and not it alone
    wrapped.save_pretrained(tmp_path / "lora")
    expected = wrapped.eval()(input_ids=tokens()).logits
    again = peft.PeftModel.from_pretrained(converted(), tmp_path / "lora").eval()
    assert torch.equal(again(input_ids=tokens()).logits, expected)
    assert not torch.allclose(converted().eval()(tokens()).logits, expected, atol=1e-2)


def test_accelerate_with_a_frozen_base(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="no")
    model = dr.convert(plain_model(), dr.RoutingConfig("delta"))
    model.freeze_base()
    before = {n: p.clone() for n, p in model.named_parameters() if "routing" not in n}
    optimiser = torch.optim.AdamW(dr.parameter_groups(model, lr=1e-3, routing_lr=3e-2))
    loader = torch.utils.data.DataLoader(Repeating(), batch_size=16)
    model, optimiser, loader = accelerator.prepare(model, optimiser, loader)
    history = []
    for _ in range(8):
        for batch in loader:
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimiser.step()
            optimiser.zero_grad()
            history.append(loss.item())
    assert history[-1] < history[0] - 0.05
    unwrapped = accelerator.unwrap_model(model)
    assert all(torch.equal(unwrapped.get_parameter(n), p) for n, p in before.items())
    unwrapped.save_pretrained(
        tmp_path / "all", state_dict=accelerator.get_state_dict(model), is_main_process=True
    )
    assert_loads_equal(tmp_path / "all", unwrapped)
    unwrapped.save_pretrained(tmp_path / "adapter", adapter_only=True)
    attached = dr.load_adapter(plain_model(), tmp_path / "adapter")
    assert torch.equal(attached(tokens()).logits, unwrapped.eval()(tokens()).logits)


def test_the_text_generation_pipeline_runs_a_saved_model(tmp_path):
    from transformers import AutoTokenizer, pipeline

    model = trained_like(converted())
    model.save_pretrained(tmp_path)
    word_tokenizer().save_pretrained(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path)("w1 w2").input_ids[-2:] == [5, 6]
    generate = pipeline("text-generation", model=str(tmp_path), device="cpu")
    (result,) = generate("w1 w2 w3", max_new_tokens=5, do_sample=False)
    assert result["generated_text"].startswith("w1 w2 w3")
    assert len(result["generated_text"].split()) >= 6
    assert isinstance(generate.model, type(model))


@pytest.mark.parametrize("method", ["delta", "attnres", "depth_attention"])
def test_assisted_decoding_gives_the_greedy_tokens(method):
    routing = dr.RoutingConfig(method, init="paper")
    model = trained_like(dr.from_config(llama_config(), routing))
    draft = trained_like(dr.from_config(llama_config(layers=2), dr.RoutingConfig("standard")))
    ids = tokens(batch=1, length=8)
    options = {"max_new_tokens": 10, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    expected = model.generate(ids, **options)
    for drafting in ({"assistant_model": draft}, {"assistant_early_exit": 2}):
        assert torch.equal(model.generate(ids, **drafting, **options), expected)


@pytest.mark.parametrize("method", METHODS)
@torch.no_grad()
def test_a_decoder_that_ends_early_has_the_residual_state_after_its_last_layer(method):
    model = routed_model(method)
    expected = model.model(tokens(), output_hidden_states=True).hidden_states[2]
    model.config.num_hidden_layers = 2  # as for assistant_early_exit
    assert torch.equal(model.model(tokens()).last_hidden_state, model.model.norm(expected))


def test_sampling_is_reproducible_with_and_without_a_cache():
    model = trained_like(dr.from_config(llama_config(), dr.RoutingConfig("delta", num_blocks=3)))
    ids = tokens(length=8)
    options = {"max_new_tokens": 8, "do_sample": True, "attention_mask": torch.ones_like(ids)}
    results = []
    for use_cache in (True, False):
        set_seed(7)
        results.append(model.generate(ids, use_cache=use_cache, **options))
    assert torch.equal(*results)
