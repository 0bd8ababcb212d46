"""Curvature of a loss with attention: Hessian times vector, without the Hessian.

    python examples/hessian_vector_product.py

jvp of grad is the Hessian along one direction, for three to four gradients: in memory that
is linear in the length of the sequence and in the number of parameters. From such products alone
come the largest eigenvalue (how sharp a minimum is, and which learning rates diverge), Newton steps
by conjugate gradients, and influence functions.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import functional_call, grad, hessian, jvp

import qkv

Parameters = dict[str, Tensor]


def hessian_vector_product(loss, parameters: Parameters, direction: Parameters) -> Parameters:
    return jvp(grad(loss), (parameters,), (direction,))[1]


def largest_eigenvalue(loss, parameters: Parameters, steps: int) -> float:
    """The one farthest from 0, by power iteration."""
    v, eigenvalue = {n: torch.randn_like(p) for n, p in parameters.items()}, 0.0
    for _ in range(steps):
        length = sum(x.square().sum() for x in v.values()).sqrt()
        v = {n: x / length for n, x in v.items()}
        hv = hessian_vector_product(loss, parameters, v)
        eigenvalue = sum((v[n] * hv[n]).sum() for n in v).item()
        v = hv
    return eigenvalue


def problem(length: int, width: int, heads: int):
    """The loss of a causal self-attention as a function of its parameters, and those."""
    torch.manual_seed(0)
    module = qkv.nn.MultiheadAttention(width, heads, causal=True, bias=False).double()
    x = torch.randn(1, length, width, dtype=torch.float64)
    target = x.roll(1, 1)  # each token is to say which was before it

    def loss(parameters: Parameters) -> Tensor:
        # Not mse_loss: of its gradient, PyTorch 2.11 has no forward mode under torch.func.
        return (functional_call(module, parameters, (x,)) - target).square().mean()

    return loss, {n: p.detach() for n, p in module.named_parameters()}, x, target


def written_down(parameters: Parameters, x: Tensor, target: Tensor, heads: int) -> Tensor:
    """The same loss with the matrix of weights, in plain operations of PyTorch."""
    q, k, v = ((x @ parameters[f"w_{n}.weight"].T).unflatten(-1, (heads, -1)).transpose(1, 2)
               for n in "qkv")  # fmt: skip
    scores = q @ k.mT / q.size(-1) ** 0.5
    future = torch.ones_like(scores, dtype=torch.bool).triu(1)
    out = scores.masked_fill(future, float("-inf")).softmax(-1) @ v
    found = out.transpose(1, 2).flatten(-2) @ parameters["w_o.weight"].T
    return (found - target).square().mean()


@dataclass
class Result:
    product_error: float  # beside the whole Hessian of the loss as written down, relative
    eigenvalues: tuple[float, float]  # by power iteration, and of that Hessian


def main(length: int = 6, width: int = 4, heads: int = 2, long: int = 1024) -> Result:
    loss, parameters, x, target = problem(length, width, heads)
    direction = {n: torch.randn_like(p) for n, p in parameters.items()}
    product = hessian_vector_product(loss, parameters, direction)

    whole = hessian(lambda p: written_down(p, x, target, heads))(parameters)
    size = sum(p.numel() for p in parameters.values())
    matrix = torch.cat([torch.cat([whole[a][b].reshape(parameters[a].numel(), -1)
                                   for b in parameters], 1) for a in parameters])  # fmt: skip
    flat = lambda of: torch.cat([of[n].flatten() for n in parameters])
    expected = matrix @ flat(direction)
    error = ((flat(product) - expected).abs().max() / expected.abs().max()).item()
    print(f"{size} parameters: Hessian times vector beside the {size} x {size} one: {error:.1e}")

    found = largest_eigenvalue(loss, parameters, 100)
    eigenvalues = torch.linalg.eigvalsh(matrix)
    exact = eigenvalues[eigenvalues.abs().argmax()].item()
    print(f"largest eigenvalue {found:.6f}, of the matrix {exact:.6f}")

    loss, parameters, *_ = problem(long, 32, 4)
    sharpness = largest_eigenvalue(loss, parameters, 20)
    print(f"of a loss over {long} tokens, after 20 products: {sharpness:.4f}")
    return Result(error, (found, exact))


if __name__ == "__main__":
    main()
