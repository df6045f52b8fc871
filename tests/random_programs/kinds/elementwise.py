"""Functions of elements, masks, integers, repetition and attention. What rows may name: `row`."""

from tests.random_programs.kinds.row import row

ROWS = (
    row(
        "where grad nan guard",
        """
        s = torch.where(h > 0, h, torch.ones_like(h)).sqrt()
        h = torch.where(h > 0, s, h * 0)
        """,
    ),
    row(
        "clamp tensors",
        "h = torch.clamp(h, self.lo, self.hi)",
        init="""
        self.lo = nn.Parameter(torch.full((D,), -0.3))
        self.hi = nn.Parameter(torch.full((T, 1), 0.3))
        """,
    ),
    row(
        "lerp addcmul",
        """
        h = (
            torch.lerp(h, h.roll(1, 2), self.w)
            + torch.addcmul(h, self.w, self.w, value=0.3)
            + torch.addcdiv(h, self.w, self.w + 2, value=0.2)
        )
        """,
        init="self.w = nn.Parameter(torch.rand(D))",
    ),
    row(
        "xlogy etc",
        """
        a = h.abs() + 0.1
        h = (
            torch.xlogy(a, a)
            + torch.special.xlog1py(a, a)
            + torch.logaddexp(h, a)
            + torch.hypot(h, a)
            + torch.atan2(h, a)
            + torch.fmod(h, 0.7)
            + torch.remainder(h, 0.3)
            + torch.copysign(a, h)
            + torch.special.entr(a)
        )
        """,
    ),
    row(
        "gammas",
        """
        a = h.abs() + 0.5
        h = (
            torch.lgamma(a)
            + torch.digamma(a)
            + torch.erf(h)
            + torch.erfc(h)
            + torch.erfinv(h * 0.5)
            + torch.special.i0(h)
            + torch.sinc(h)
            + torch.logit(torch.sigmoid(h))
            + torch.special.ndtr(h)
        )
        """,
    ),
    row(
        "pow tensor",
        """
        a = h.abs() + 0.5
        h = a**self.w + 2.0**h + torch.float_power(a, 1.5)
        """,
        init="self.w = nn.Parameter(torch.rand(D))",
    ),
    row(
        "floor_divide etc",
        """
        h = (
            h
            + torch.floor_divide(h.detach(), 0.3)
            + h.trunc()
            + h.frac()
            + h.ceil() * 0.1
            + torch.heaviside(h.detach(), h.detach() * 0)
        )
        """,
    ),
    row("isnan mask", "h = torch.where(torch.isfinite(h) & ~torch.isnan(h) & torch.isclose(h, h), h, 0.0)"),
    row(
        "bool logic",
        """
        m = (h > 0) ^ (h.roll(1, 2) > 0)
        h = (
            h * m
            + m.any(2, keepdim=True)
            + m.all(1, keepdim=True).to(h.dtype)
            + m.sum(2, keepdim=True) * 0.1
            + torch.count_nonzero(m, 1)[:, None] * 0.1
        )
        """,
    ),
    row(
        "int ops",
        """
        n = (h * 10).long()
        h = (
            h
            + n // 3 % 5 * 0.1
            + (n & 3) * 0.1
            + (n << 1) * 0.01
            + n.cumsum(2) * 0.01
            + n.amax(2, keepdim=True) * 0.01
            + torch.gcd(n, n.roll(1, 2)) * 0.01
        )
        """,
    ),
    row("glu", "h = h + F.glu(h, 2).repeat(1, 1, 2)", divisor=2),
    row(
        "tile repeat",
        "h = h + h.repeat(1, 2, 1)[:, ::2] + h.tile(1, 1, 2)[..., ::2] + h.repeat_interleave(2, 2)[..., :D]",
    ),
    row(
        "meshgrid cartesian",
        """
        a, b = torch.meshgrid(self.a, self.b, indexing="ij")
        h = h + a * b
        """,
        init="""
        self.a = nn.Parameter(torch.randn(T))
        self.b = nn.Parameter(torch.randn(D))
        """,
    ),
    row(
        "block_diag",
        "h = h @ torch.block_diag(self.a, self.b)",
        init="""
        self.a = nn.Parameter(torch.randn(2, 2))
        self.b = nn.Parameter(torch.randn(D - 2, D - 2) * 0.3)
        """,
    ),
    row(
        "expand_as size1",
        """
        m = h.mean(2, keepdim=True)
        h = h + m.expand_as(h) + m.squeeze(2).unsqueeze(2)
        """,
    ),
    row(
        "sdpa gqa",
        """
        q = h.view(h.size(0), T, 4, -1).transpose(1, 2)
        kk = q[:, :2]
        h = h + F.scaled_dot_product_attention(q, kk, kk, is_causal=True, enable_gqa=True).transpose(
            1, 2
        ).reshape(h.shape)
        """,
        divisor=4,
    ),
    row(
        "sdpa mask param",
        """
        q = h.view(h.size(0), T, 2, -1).transpose(1, 2)
        h = h + F.scaled_dot_product_attention(q, q, q, attn_mask=self.m).transpose(1, 2).reshape(h.shape)
        """,
        init="self.m = nn.Parameter(torch.randn(1, T, T))",
        divisor=2,
    ),
    row(
        "mha",
        """
        h = (
            h
            + self.a(h, h, h, need_weights=True)[1].mean(2, keepdim=True)
            + self.a(h, h, h, need_weights=False)[0]
        )
        """,
        init="self.a = nn.MultiheadAttention(D, 2, batch_first=True, bias=True, add_bias_kv=False)",
        divisor=2,
    ),
    row(
        "mha addkv",
        "h = h + self.a(h, h, h, need_weights=False)[0]",
        init="self.a = nn.MultiheadAttention(D, 2, batch_first=True, add_bias_kv=True, add_zero_attn=True)",
        divisor=2,
    ),
)
