"""AdamW and what stands beside it: AdaLoRA, GaLore, LISA; learning rates and the loss scale."""
