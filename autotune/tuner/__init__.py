"""The Optuna study and what drives it: self-test, proofs, timing, decisions."""
