"""A ray caster for toys: one view under several lights, with shadows, compiled by Numba.

Each solid has local coordinates in which it has size one, so that only four short intersections are needed. Rays from
the camera find the visible points; rays from there to each light find the shadows. All lights share the camera rays.
"""

from __future__ import annotations

from math import sqrt

import numpy as np
from numba import njit

from tritoncaps.data.toys import BOX, CYLINDER, ELLIPSOID

FAR = 1e9
SAMPLES = 2  # rays along each side of a pixel
GROUND = 0.75
AMBIENT = 0.5

_compiled = njit(nogil=True, error_model="numpy", cache=True)


@_compiled
def render(kinds, to_local, albedo, reach, eye, right, up, ahead, zoom, middle, lights, images):
    """Fill ``images`` [L, H, W], in [0, 1], one for each row of ``lights`` [L, 4]: a direction and a brightness.

    ``eye`` is the position of the camera, ``ahead`` its direction. A pixel has the size 1 / ``zoom`` at distance one,
    and ``middle`` is the pixel in the direction ``ahead``. The toy is within ``reach`` of the vertical axis.
    """
    count, height, width = images.shape
    solids = len(kinds)
    ray, point, normal = np.empty(3), np.empty(3), np.empty(3)
    eyes, starts, local = np.empty((solids, 3)), np.empty((solids, 3)), np.empty(3)
    to_lights = np.empty((count, solids, 3))
    for s in range(solids):
        into(to_local, s, eye, 1.0, eyes[s])
        for light in range(count):
            into(to_local, s, lights[light], 0.0, to_lights[light, s])
    images[:] = 0.0
    for y in range(height):
        for x in range(width):
            for sample in range(SAMPLES * SAMPLES):
                across = (x + (sample % SAMPLES + 0.5) / SAMPLES - middle[1]) / zoom
                down = (y + (sample // SAMPLES + 0.5) / SAMPLES - middle[0]) / zoom
                for k in range(3):
                    ray[k] = ahead[k] + across * right[k] - down * up[k]
                distance, solid = -eye[2] / ray[2], -1  # the ground
                if near(eye, ray, reach):
                    for s in range(solids):
                        dx, dy, dz = turned(to_local, s, ray)
                        t = hit(kinds[s], eyes[s, 0], eyes[s, 1], eyes[s, 2], dx, dy, dz)
                        if t < distance:
                            distance, solid = t, s
                for k in range(3):
                    point[k] = eye[k] + distance * ray[k]
                normal[0], normal[1], normal[2] = 0.0, 0.0, 1.0
                paint = GROUND
                if solid >= 0:
                    into(to_local, solid, point, 1.0, local)
                    surface(kinds[solid], local)
                    outwards(to_local, solid, local, normal)
                    paint = albedo[solid]
                for k in range(3):
                    point[k] += 1e-3 * normal[k]
                started = False
                for light in range(count):
                    to_light = lights[light]
                    facing = normal[0] * to_light[0] + normal[1] * to_light[1] + normal[2] * to_light[2]
                    shine = AMBIENT * (0.75 + 0.25 * normal[2])
                    if facing > 0:
                        lit = True
                        if near(point, to_light, reach):
                            if not started:
                                started = True
                                for s in range(solids):
                                    into(to_local, s, point, 1.0, starts[s])
                            lit = not blocked(kinds, starts, to_lights, light)
                        if lit:
                            shine += (1 - AMBIENT) * facing
                    images[light, y, x] += paint * shine * to_light[3] / (SAMPLES * SAMPLES)


@_compiled
def near(origin, ray, reach):
    """True if the ray meets the sphere around the toy."""
    x, y, z = origin[0], origin[1], origin[2] - 0.6 * reach
    a = ray[0] * ray[0] + ray[1] * ray[1] + ray[2] * ray[2]
    b = x * ray[0] + y * ray[1] + z * ray[2]
    c = x * x + y * y + z * z - 1.4 * reach * reach
    return b * b >= a * c and (b < 0 or c < 0)


@_compiled
def blocked(kinds, starts, to_lights, light):
    for s in range(len(kinds)):
        dx, dy, dz = to_lights[light, s, 0], to_lights[light, s, 1], to_lights[light, s, 2]
        if hit(kinds[s], starts[s, 0], starts[s, 1], starts[s, 2], dx, dy, dz) < FAR:
            return True
    return False


@_compiled
def into(to_local, s, vector, shift, out):
    """Convert a point (``shift`` 1) or a direction (0) to the local coordinates of solid ``s``."""
    for k in range(3):
        out[k] = (
            to_local[s, k, 0] * vector[0]
            + to_local[s, k, 1] * vector[1]
            + to_local[s, k, 2] * vector[2]
            + shift * to_local[s, k, 3]
        )


@_compiled
def turned(to_local, s, ray):
    x, y, z = ray[0], ray[1], ray[2]
    return (
        to_local[s, 0, 0] * x + to_local[s, 0, 1] * y + to_local[s, 0, 2] * z,
        to_local[s, 1, 0] * x + to_local[s, 1, 1] * y + to_local[s, 1, 2] * z,
        to_local[s, 2, 0] * x + to_local[s, 2, 1] * y + to_local[s, 2, 2] * z,
    )


@_compiled
def hit(kind, x, y, z, dx, dy, dz):
    """The distance along the ray from (x, y, z) to a solid of size one, or FAR."""
    if kind == ELLIPSOID:
        return first_root(dx * dx + dy * dy + dz * dz, x * dx + y * dy + z * dz, x * x + y * y + z * z - 1)
    if kind == BOX:
        enter, leave = slab(x, dx, -FAR, FAR)
        enter, leave = slab(y, dy, enter, leave)
        enter, leave = slab(z, dz, enter, leave)
        return enter if 0 < enter <= leave else FAR
    if kind == CYLINDER:  # radius 1 about z, from -1 to 1
        t = first_root(dx * dx + dy * dy, x * dx + y * dy, x * x + y * y - 1)
        if t < FAR and abs(z + t * dz) <= 1:
            return t
        return disc(x, y, z, dx, dy, dz, -1.0 if dz > 0 else 1.0)
    w, dw = 0.5 * (1 - z), -0.5 * dz  # a cone: radius 1 at z = -1, a point at z = 1
    t = first_root(dx * dx + dy * dy - dw * dw, x * dx + y * dy - w * dw, x * x + y * y - w * w)
    if t < FAR and abs(z + t * dz) <= 1:
        return t
    return disc(x, y, z, dx, dy, dz, -1.0)


@_compiled
def first_root(a, half_b, c):
    """The smaller root of a t^2 + 2 half_b t + c if it is positive, otherwise FAR."""
    discriminant = half_b * half_b - a * c
    if discriminant < 0 or abs(a) < 1e-12:
        return FAR
    t = (-half_b - sqrt(discriminant)) / a
    return t if t > 0 else FAR


@_compiled
def slab(x, dx, enter, leave):
    """The part of the interval (enter, leave) in which the ray is between -1 and 1 along one axis."""
    if abs(dx) < 1e-12:
        return (enter, leave) if abs(x) <= 1 else (FAR, -FAR)
    t0, t1 = (-1 - x) / dx, (1 - x) / dx
    return max(enter, min(t0, t1)), min(leave, max(t0, t1))


@_compiled
def disc(x, y, z, dx, dy, dz, height):
    if abs(dz) < 1e-12:
        return FAR
    t = (height - z) / dz
    x, y = x + t * dx, y + t * dy
    return t if t > 0 and x * x + y * y <= 1 else FAR


@_compiled
def surface(kind, p):
    """Replace a point on a solid of size one by the normal of the surface there."""
    if kind == ELLIPSOID:
        return
    if kind == BOX:
        axis = np.argmax(np.abs(p))
        sign = np.sign(p[axis])
        p[:] = 0.0
        p[axis] = sign
    elif kind == CYLINDER:
        if abs(p[2]) < 1 - 1e-6:
            p[2] = 0.0
        else:
            p[0], p[1] = 0.0, 0.0
    elif p[2] > -1 + 1e-6:
        p[2] = 0.25 * (1 - p[2])
    else:
        p[0], p[1] = 0.0, 0.0


@_compiled
def outwards(to_local, s, direction, out):
    """Convert a normal from local coordinates of solid ``s`` to world coordinates, with length one."""
    for k in range(3):
        out[k] = to_local[s, 0, k] * direction[0] + to_local[s, 1, k] * direction[1] + to_local[s, 2, k] * direction[2]
    length = sqrt(out[0] * out[0] + out[1] * out[1] + out[2] * out[2])
    for k in range(3):
        out[k] /= length
