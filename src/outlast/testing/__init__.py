"""Public harness: what runs are tried with before hardware tries them."""
