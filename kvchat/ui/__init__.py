"""What a person sees: the screen, the gauge, tables and the prompt. Plain dataclasses come in; torch never does."""
