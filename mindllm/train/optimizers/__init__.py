"""AdamW, with moments of 8 bits too, and beside it Muon, AdaLoRA, GaLore, LISA; learning rates and the loss scale."""
