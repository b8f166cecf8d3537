"""How tokens reach experts. Experts cannot tell which algorithm fed them."""
