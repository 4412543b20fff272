"""Which attention kernel may a serving engine call, on this GPU, for this batch, and how do we know?

Importing this package imports nothing else: a serving process that only wants
``autotune.router`` must not pay for torch, Optuna or SQLAlchemy.
"""

__version__ = "0.1.0"
