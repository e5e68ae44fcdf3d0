"""What tensor parallel must know of a model: matrices that can be sliced, and regions of sequences."""
