"""What is asked and what is decided: frozen values with no behaviour but arithmetic. Imports nothing of ours."""
