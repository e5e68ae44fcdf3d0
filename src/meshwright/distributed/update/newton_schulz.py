"""Newton-Schulz: an orthogonal matrix near to a given one, by products of matrices alone, of many matrices at once."""

import torch

__all__ = ["COEFFICIENTS", "EPS", "STEPS", "newton_schulz"]

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of Jordan et al. 2024 (https://kellerjordan.github.io/posts/muon/), as in ``torch.optim.Muon``."""

EPS, STEPS = 1e-7, 5
"""As in ``torch.optim.Muon``."""


def newton_schulz(
    matrices: torch.Tensor,
    steps: int = STEPS,
    coefficients: tuple[float, float, float] = COEFFICIENTS,
    eps: float = EPS,
) -> torch.Tensor:
    """Return U S' V^T for each matrix U S V^T, with all singular values in S' near to 1.

    Each step is ``X <- aX + (bA + cA^2) X`` with ``A = X X^T`` (Bernstein and Newhouse 2024, arXiv 2409.20325; coefficients of
    Jordan et al. 2024). A matrix is divided by its Frobenius norm first, so that no singular value is above 1.

    Args:
        matrices: [batch, rows, columns], in the dtype to compute in. They are overwritten.
        steps: number of steps.
        coefficients: a, b and c.
        eps: the least number that a matrix is divided by.

    Returns:
        [batch, rows, columns], in the same dtype.
    """
    a, b, c = coefficients
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    if x.numel():
        x.div_(torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=eps))
        # In memory of its own, which all steps use again.
        following, gram = torch.empty_like(x), x.new_empty(len(x), x.shape[1], x.shape[1])
        polynomial = torch.empty_like(gram)
        for _ in range(steps):
            torch.bmm(x, x.mT, out=gram)
            torch.baddbmm(gram, gram, gram, beta=b, alpha=c, out=polynomial)
            torch.baddbmm(x, polynomial, x, beta=a, out=following)
            x, following = following, x
    return x.mT if tall else x
