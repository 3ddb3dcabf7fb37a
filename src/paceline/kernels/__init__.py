"""The ops of a model, one folder each: what `core.program.OpKind` names, as torch modules. `forward/` puts them together."""
