"""AdamW and what stands beside it: Muon, AdaLoRA, GaLore, LISA; learning rates and the loss scale."""
