"""Checks our checkpoints against Hugging Face's own code: make interop.

  .venv/bin/python scripts/check_interop.py write DIR
  .venv-interop/bin/python scripts/check_interop.py check DIR

The first exports small random models and adapters, with the logits that we
compute and the ids that we emit; the second, in an environment with PyTorch,
loads each of them in transformers and PEFT and compares.
"""

# PyTorch and transformers are in an environment of their own.
# pyright: reportMissingImports=false

import json
import pathlib
import sys

import numpy as np

# Largest difference of logits of a few units, both in float32.
TOLERANCE = 2e-5
WORDS = ("guess", "higher", "lower", "1", "2")
CONVERSATION = (
  ("system", "guess"),
  ("user", " 1  2\n"),
  ("assistant", "2"),
  ("user", "lower"),
  ("assistant", ""),
  ("user", "higher"),
)


def write(directory: pathlib.Path) -> None:
  """Exports every model, beside what it must compute."""
  sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
  from models.chat import word_chat
  from models.hf import export

  words = word_chat.WordChat(WORDS)
  tokens = np.random.default_rng(0).integers(0, 24, (3, 40), np.int32)
  for name, config in configs().items():
    params = random_params(config)
    export.export(directory / name, params, config, words, 20_000)
    np.savez(
      directory / f"{name}.npz",
      tokens=tokens,
      logits=logits(params, config, tokens),
    )
  write_adapters(directory / "adapters", tokens)
  ids = conversation_ids(words)
  (directory / "conversation.json").write_text(json.dumps(ids))


def configs():
  """Returns the models by name; dense and sparse, with all that differs."""
  from models import config, rope

  # Longer than the texts that it stretches from, so that it acts.
  yarn = rope.Yarn(factor=4.0, original_max_length=16)
  sizes = {
    "vocab_size": 24,
    "num_layers": 3,
    "d_model": 32,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "d_ff": 48,
    "d_expert": 24,
    "max_length": 64,
  }
  return {
    "dense": config.tiny(**sizes, tie_embeddings=False),
    "dense_tied": config.tiny(**sizes, tie_embeddings=True),
    "dense_yarn": config.tiny(**sizes, rope_scaling=yarn),
    "moe": config.tiny_moe(**sizes, tie_embeddings=False),
    "moe_tied": config.tiny_moe(
      **sizes, tie_embeddings=True, dense_layers=(1,), norm_topk_prob=False
    ),
    "llama": config.tiny(
      **sizes,
      qk_norm=False,
      rope_scaling=rope.Llama3(factor=4.0, original_max_length=16),
    ),
    "qwen2": config.tiny(**sizes, qk_norm=False, qkv_bias=True),
    "mistral": config.tiny(
      **sizes, qk_norm=False, window=config.Window(size=5)
    ),
    "gemma3": config.tiny(
      **sizes,
      architecture="gemma",
      query_pre_attn_scalar=9,
      rope_scaling=rope.Linear(factor=2.0),
      window=config.Window(size=5, full_every=2, rope_theta=100.0),
    ),
    "olmo2": config.tiny(**sizes, architecture="olmo"),
    "olmo3": config.tiny(
      **sizes | {"num_kv_heads": 4},
      architecture="olmo",
      rope_theta=5e5,
      rope_scaling=yarn,
      window=config.Window(size=5, full_every=2, rope_theta=5e5),
    ),
    "olmoe": config.tiny_moe(
      **sizes | {"head_dim": 8}, architecture="olmoe", norm_topk_prob=False
    ),
    "moe_yarn": config.tiny_moe(**sizes, rope_scaling=yarn, dense_layers=(0,)),
  }


def write_adapters(directory: pathlib.Path, tokens) -> None:
  """Exports adapters of some of the models, beside what both compute."""
  import dataclasses

  from models import lora
  from models import policy as policy_lib
  from models.hf import peft

  directory.mkdir()
  for name, (base, targets) in adapted().items():
    bare = configs()[base]
    settings = lora.Lora(rank=2, alpha=3.0, targets=targets)
    config = dataclasses.replace(bare, lora=settings)
    config.validate()
    adapters, _ = lora.split(policy_lib.of(config).shapes)
    params = lora.join(random_leaves(adapters), random_params(bare))
    peft.export(directory / name, params, config, base)
    np.savez(
      directory / f"{name}.npz",
      base=base,
      tokens=tokens,
      logits=logits(params, config, tokens),
    )


def adapted():
  """Returns (model, targets) by name: all that lie differently in PEFT."""
  from models import lora

  mlp, tables = ("gate", "up", "down"), ("embed", "head")
  return {
    "dense": ("dense_tied", lora.TARGETS[:7]),
    "dense_all": ("dense", (*lora.TARGETS[:7], *tables)),
    "moe_all": ("moe", lora.TARGETS),
    "moe_mixed": ("moe_tied", (*mlp, "router")),
    "biased": ("qwen2", lora.TARGETS[:7]),
    "olmo": ("olmo2", lora.TARGETS[:7]),
    "gemma": ("gemma3", lora.TARGETS[:7]),
    "moe_attention": ("moe", ("query", "value")),
    "moe_gate": ("moe", ("gate",)),
    "moe_gate_up": ("moe", ("up", "gate", "out")),
    "moe_up_down": ("moe_tied", ("down", "up")),
  }


def random_params(config):
  """Returns weights without structure, so that no part of a model is idle."""
  from models import policy as policy_lib

  return random_leaves(policy_lib.of(config).shapes, 1 - config.norm_offset)


def random_leaves(shapes, one=1.0):
  """Returns noise in the shape of each leaf, around `one` for norms."""
  import jax
  import jax.numpy as jnp

  rng = np.random.default_rng(1)
  return jax.tree.map(
    lambda x: jnp.asarray(
      rng.normal(one * (x.ndim == 1), 0.2, x.shape), x.dtype
    ),
    shapes,
  )


def logits(params, config, tokens):
  """Returns ours, of whole rows."""
  import jax
  import jax.numpy as jnp

  from models import logprobs
  from models import policy as policy_lib

  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)

  @jax.jit
  def forward(params, tokens):
    model = policy_lib.of(config).bind(params)
    hidden, _ = model.hidden(tokens, positions, jnp.ones_like(tokens))
    return logprobs.logits(model.terms(hidden))

  return np.asarray(forward(params, jnp.asarray(tokens)))


def conversation_ids(words):
  """Returns the ids of CONVERSATION, up to where the agent speaks again."""
  import types

  ids, said = [], []
  for number, (role, content) in enumerate((*CONVERSATION, ("assistant", ""))):
    if role != "assistant":
      said.append(types.SimpleNamespace(role=role, content=content))
      continue
    ids += words.open(said).tolist()
    said = []
    if number < len(CONVERSATION):
      ids += words.encode_answer(content).tolist()
  return ids


def check(directory: pathlib.Path) -> None:
  """Loads every model in transformers; raises on the first difference."""
  import transformers

  transformers.utils.logging.disable_progress_bar()
  names = sorted(path.stem for path in directory.glob("*.npz"))
  assert names, f"{directory} holds no exported models"
  for name in names:
    check_logits(directory, name)
    check_saved_again(directory, name)
    # transformers gives every Qwen2 its own tokenizer, whatever the files name.
    if name != "qwen2":
      check_tokenizer(directory, name)
  names = sorted(path.stem for path in (directory / "adapters").glob("*.npz"))
  assert names, f"{directory} holds no exported adapters"
  for name in names:
    check_adapter(directory, name)


def check_logits(directory: pathlib.Path, name: str) -> None:
  """transformers computes our logits."""
  import torch
  import transformers

  model, report = transformers.AutoModelForCausalLM.from_pretrained(
    directory / name, attn_implementation="eager", output_loading_info=True
  )
  wrong = {kind: names for kind, names in report.items() if names}
  assert not wrong, (name, wrong)
  assert model.dtype == torch.float32
  with np.load(directory / f"{name}.npz") as ours:
    tokens, expected = ours["tokens"], ours["logits"]
  with torch.no_grad():
    found = model(torch.from_numpy(tokens).long()).logits.numpy()
  gap = float(np.abs(found - expected).max())
  largest = float(np.abs(expected).max())
  print(f"{name}: logits of up to {largest:.1f} differ by {gap:.1e} at most")
  assert gap <= TOLERANCE, f"{name}: {gap} is above {TOLERANCE}"


def check_saved_again(directory: pathlib.Path, name: str) -> None:
  """Checks that transformers saves ours as it was, tensor by tensor."""
  import tempfile

  import safetensors.numpy
  import transformers

  def tensors(path):
    files = sorted(pathlib.Path(path).glob("*.safetensors"))
    loaded = [safetensors.numpy.load_file(file) for file in files]
    return {key: value for file in loaded for key, value in file.items()}

  model = transformers.AutoModelForCausalLM.from_pretrained(directory / name)
  with tempfile.TemporaryDirectory() as path:
    model.save_pretrained(path)
    theirs = tensors(path)
  ours = tensors(directory / name)
  assert theirs.keys() == ours.keys(), theirs.keys() ^ ours.keys()
  for key, value in ours.items():
    assert value.tobytes() == theirs[key].tobytes(), (name, key)


def check_adapter(directory: pathlib.Path, name: str) -> None:
  """PEFT computes our logits, merged or not, and saves our adapter again."""
  import tempfile
  import warnings

  import peft
  import safetensors.numpy
  import torch
  import transformers

  # PEFT applies the pattern of a fused parameter's rank, and says otherwise.
  warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys")
  path = directory / "adapters" / name
  with np.load(f"{path}.npz") as ours:
    base, tokens, expected = str(ours["base"]), ours["tokens"], ours["logits"]
  model = transformers.AutoModelForCausalLM.from_pretrained(
    directory / base, attn_implementation="eager"
  )
  adapted = peft.PeftModel.from_pretrained(model, path)
  report = adapted.load_adapter(path, "again")
  wrong = {kind: names for kind, names in report._asdict().items() if names}
  assert not wrong, (name, wrong)
  with tempfile.TemporaryDirectory() as saved:
    adapted.save_pretrained(saved, save_embedding_layers=False)
    file = "adapter_model.safetensors"
    theirs = safetensors.numpy.load_file(pathlib.Path(saved) / file)
  ours = safetensors.numpy.load_file(path / file)
  assert theirs.keys() == ours.keys(), theirs.keys() ^ ours.keys()
  for key, value in ours.items():
    assert value.tobytes() == theirs[key].tobytes(), (name, key)
  gaps = []
  ids = torch.from_numpy(tokens).long()
  with torch.no_grad():
    for compute in (adapted, adapted.merge_and_unload()):
      found = compute(ids).logits.numpy()
      gaps.append(float(np.abs(found - expected).max()))
  print(f"{name}: logits with an adapter differ by {max(gaps):.1e} at most")
  assert max(gaps) <= TOLERANCE, f"{name}: {gaps} is above {TOLERANCE}"


def check_tokenizer(directory: pathlib.Path, name: str) -> None:
  """The chat template gives our ids, and they decode to the words."""
  import transformers

  tokenizer = transformers.AutoTokenizer.from_pretrained(directory / name)
  messages = [{"role": r, "content": c} for r, c in CONVERSATION]
  found = tokenizer.apply_chat_template(
    messages, add_generation_prompt=True, return_dict=False
  )
  expected = json.loads((directory / "conversation.json").read_text())
  assert list(found) == expected, (name, found, expected)
  assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 0)
  text = tokenizer.decode(expected, skip_special_tokens=True)
  assert text == "guess 1 2 2 lower higher", text
  for content, reason in (
    ("guess hihger", "Missing [UNK] token"),
    ("1 <end>", "holds the special token <end>"),
    ("1<end>2", "holds the special token <end>"),
  ):
    said = "nothing"
    try:
      tokenizer.apply_chat_template([{"role": "user", "content": content}])
    except Exception as error:  # Rust raises bare ones.
      said = str(error)
    assert reason in said, (content, said)


if __name__ == "__main__":
  step, where = sys.argv[1:]
  {"write": write, "check": check}[step](pathlib.Path(where))
