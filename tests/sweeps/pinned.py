"""What the sweep does not call, or finds typed invariant by right: so that neither grows unseen."""

NO_ARRAYS = "takes no arrays, or returns none"
COLLECTIVE = "a collective: swept by collectives.py"
# From a function that is not called to why.
NOT_CALLED = {
    **dict.fromkeys(
        """
        numpy.arange numpy.array_repr numpy.array_str numpy.bartlett numpy.blackman
        numpy.broadcast_shapes numpy.diag_indices numpy.einsum_path numpy.empty numpy.eye
        numpy.from_dlpack numpy.frombuffer numpy.fromfile numpy.fromiter numpy.fromstring
        numpy.get_printoptions numpy.hamming numpy.hanning numpy.identity numpy.indices numpy.load
        numpy.mask_indices numpy.ones numpy.printoptions numpy.promote_types numpy.result_type
        numpy.save numpy.savez numpy.set_printoptions numpy.tri numpy.tril_indices
        numpy.triu_indices numpy.zeros numpy.fft.fftfreq numpy.fft.rfftfreq
        lax.ConvGeneralDilatedDimensionNumbers lax.DotDimensionNumbers lax.PrecisionLike
        lax.broadcast_shapes lax.conv_dimension_numbers lax.conv_general_permutations
        lax.conv_general_shape_tuple lax.conv_shape_tuple lax.conv_transpose_shape_tuple
        lax.create_token lax.dtype lax.empty lax.iota lax.reduce_window_shape_tuple
        lax.shape_as_value nn.get_scaled_dot_general_config random.key_dtype random.key_impl
        random.Key
        scipy.linalg.dft scipy.linalg.hadamard scipy.linalg.helmert scipy.linalg.hilbert
        scipy.linalg.invhilbert scipy.linalg.invpascal scipy.linalg.pascal scipy.special.bernoulli
        """.split(),
        NO_ARRAYS,
    ),
    **dict.fromkeys(
        """
        lax.all_gather lax.all_to_all lax.axis_index lax.axis_size lax.pbroadcast lax.pcast
        lax.pmax lax.pmean lax.pmin lax.ppermute lax.pshuffle lax.psum lax.psum_scatter
        lax.pswapaxes lax.ragged_all_to_all lax.pvary lax.pdot lax.all_gather_invariant
        lax.pgather
        """.split(),
        COLLECTIVE,
    ),
    **dict.fromkeys(
        "lax.psum_scatter_start lax.all_gather_start lax.all_gather_done".split(),
        "a half of a collective, which another function has to end",
    ),
    "lax.after_all": "tokens only",
    "lax.infeed": "reads a queue of its device",
    "lax.outfeed": "returns a token",
    "lax.xeinsum": "a private einsum of old versions",
    "lax.scan_bind": "binds a primitive's jaxpr",
    "lax.dce_sink": "returns nothing",
    "lax.psend": "is lowered for TPU alone",
    "lax.precv": "is lowered for TPU alone",
    "lax.with_sharding_constraint": "a mesh's, which is manual here",
    "nn.scaled_matmul": "is lowered for NVIDIA's GPUs alone",
    "numpy.trim_zeros": "its result's shape depends on values",
}
# From a function (a keyword, an asterisk) to why an output does not vary with an operand.
INVARIANT = {
    **dict.fromkeys(
        """
        numpy.can_cast numpy.iscomplexobj numpy.isdtype numpy.isrealobj numpy.isscalar
        numpy.issubdtype numpy.iterable numpy.ndim numpy.shape numpy.size numpy.diag_indices_from
        numpy.tril_indices_from numpy.triu_indices_from lax.padtype_to_pads
        nn.initializers.ones nn.initializers.zeros numpy.full_like lax.broadcast_like
        """.split(),
        "an operand's shape or dtype alone is used",
    ),
    **dict.fromkeys(
        """
        numpy.atleast_1d numpy.atleast_2d numpy.atleast_3d numpy.broadcast_arrays numpy.ix_
        numpy.meshgrid lax.optimization_barrier
        """.split(),
        "each output is of its own operand",
    ),
    **dict.fromkeys(
        """
        numpy.histogram numpy.histogram2d numpy.histogramdd numpy.histogram_bin_edges(bins=)
        numpy.histogram_bin_edges(weights=)
        """.split(),
        "the edges do not depend on the weights, nor on the data where edges are given",
    ),
    "numpy.linalg.lstsq": "rank and singular values are of the matrix",
    "numpy.linalg.lstsq(rcond=)": "rank and singular values are of the matrix",
    "numpy.trapezoid": "dx is not read where x is given",
    "lax.associative_scan": "the products do not depend on the sums",
    "lax.scan": "the carry does not depend on the rows",
    "lax.while_loop": "the counter does not depend on what is carried beside it",
    "scipy.linalg.cho_factor": "whether it is the lower half",
    "scipy.linalg.polar(max_iterations=)": "is not read",
    "scipy.linalg.qr(lwork=)": "is not read",
    "scipy.linalg.solve_triangular(debug=)": "is not read",
    "scipy.linalg.qr_multiply": "R is of the first matrix",
    "scipy.linalg.rsf2csf": "T is of the first matrix",
    "scipy.signal.csd": "the frequencies do not depend on the signal",
    "scipy.signal.istft": "the times do not depend on the signal",
    "scipy.signal.stft": "frequencies and times do not depend on the signal",
    "scipy.signal.welch": "the frequencies do not depend on the signal",
    "scipy.stats.poisson.entropy(loc=)": "an entropy does not depend on where the mean is",
}

# From a function to why JAX does not take it under shard_map's check.
REFUSED = {
    **dict.fromkeys(
        """
        random.beta random.chisquare random.dirichlet random.f random.gamma random.loggamma
        random.generalized_normal random.t
        """.split(),
        "JAX asks for a cast of the key by name",
    ),
    "scipy.sparse.linalg.bicgstab": "a loop's carry is less varying than what it is closed over",
    "scipy.sparse.linalg.gmres": "a loop's carry is less varying than what it is closed over",
}

# Those of the above that some JAX of the table lacks, or has under a name that is called.
OF_OTHER_VERSIONS = set(
    "lax.ConvGeneralDilatedDimensionNumbers lax.PrecisionLike lax.psend lax.precv lax.pvary "
    "lax.pdot lax.all_gather_invariant lax.pgather lax.infeed lax.outfeed lax.xeinsum "
    "lax.scan_bind lax.psum_scatter_start lax.all_gather_start lax.all_gather_done random.Key".split()
)


def way(name):
    """A function's name, with the keyword that a case of it passes."""
    return name.split("#")[0].split(" [")[0]


def function(name):
    """The name of the function that a case calls."""
    return way(name).split("(")[0]
