"""What a jaxpr and a compiled program say of axes, arrays and collectives."""
