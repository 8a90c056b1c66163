"""A routed Llama trained by a pipeline of processes; every step equals one process's.

    torchrun --nproc-per-node 2 examples/pipeline.py
    torchrun --nproc-per-node 4 examples/pipeline.py --schedule zbv

On machines with a GPU for each process: --device cuda.
"""

import argparse
import os

import torch
from torch import distributed
from transformers import LlamaConfig

import depthroute
from depthroute.parallel.layout import ORDERS, PipelineLayout
from depthroute.parallel.pipeline import Pipeline

parser = argparse.ArgumentParser()
parser.add_argument("--schedule", default="interleaved", choices=ORDERS)
parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
options = parser.parse_args()
device = torch.device(options.device)
if options.device == "cuda":
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
distributed.init_process_group("nccl" if options.device == "cuda" else "gloo")
rank, ranks = distributed.get_rank(), distributed.get_world_size()

config = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_attention_heads=4,
    num_hidden_layers=8,
    tie_word_embeddings=True,
)
torch.manual_seed(0)  # the same weights on every rank, each of which keeps its layers
model = depthroute.from_config(config, depthroute.RoutingConfig("attnres", num_blocks=4))
layout = PipelineLayout.of(model.plan, ranks=ranks, schedule=options.schedule, micro_batches=8)
pipeline = Pipeline(model, layout, device=device)
del model
if rank == 0:
    print(pipeline)

optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-2)
text = torch.tensor(list(b"the depth of a model is what it reads " * 64))
for step in range(10):
    starts = torch.randint(0, len(text) - 33, (16,), generator=torch.Generator().manual_seed(step))
    batch = torch.stack([text[start : start + 33] for start in starts])
    loss = pipeline.step(batch[:, :-1], batch[:, 1:])
    norm = pipeline.clip_gradients(1.0)
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0 and step % 3 == 0:
        print(f"step {step}  loss {loss.item():.4f}  gradient norm {norm:.2f}")
sent = {stage: traffic.forward for stage, traffic in pipeline.traffic.items()}
print(f"rank {rank} sent, forward and by stage: {sent} bytes", flush=True)
distributed.destroy_process_group()
