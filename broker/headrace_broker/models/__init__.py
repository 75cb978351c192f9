"""The models that workers registered, with their identity and the features of their templates."""
