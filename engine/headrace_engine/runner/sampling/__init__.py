"""From logits to tokens: rules, masks, penalties and random draws."""
