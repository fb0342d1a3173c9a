"""What surrounds the products of the experts: calling a layer at all, sorting ids by expert, packing weights, and the memory that packing takes."""
