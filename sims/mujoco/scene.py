"""The tabletop as MJCF: the arm, cubes that move freely, flat pads that only mark a position, one camera."""

from __future__ import annotations

import mujoco

from mmrl.sims.mujoco.arm import FINGER_TRAVEL, FOREARM, HAND_LENGTH, SHOULDER_HEIGHT, UPPER_ARM

CUBE = 0.022  # half an edge, in metres
PAD = 0.048  # half an edge of a pad
PADS = 2  # number of pads
TIMESTEP = 0.005  # seconds
SUBSTEPS = 10  # physics steps in one control step: 20 control steps a second
JOINTS = 5  # of the arm, without the fingers
STIFFNESS = 1500.0  # gain (kp) of the position actuators of the arm
SMOOTHING = 0.02  # seconds; time constant of the arm's setpoint, so that it does not jerk what it holds

_CUBE = """
    <body name="cube{i}" pos="{x} 0.9 {half}">
      <freejoint/>
      <geom name="cube{i}" type="box" size="{half} {half} {half}" mass="0.06" friction="1 0.02 0.001"/>
    </body>"""
_PAD = """
    <geom name="pad{i}" type="box" pos="{x} 1.2 0.0005" size="{half} {half} 0.001" contype="0" conaffinity="0"/>"""
_FINGER = """
                <body name="{side}" pos="0 0 -{length}">
                  <joint name="{side}" type="slide" axis="0 {sign} 0" range="0 {travel}" armature="0.1" damping="1"/>
                  <geom type="box" pos="0 {offset} 0.012" size="0.015 0.006 0.022" mass="0.03" rgba=".15 .15 .15 1"
                    friction="1 0.02 0.001" contype="1" conaffinity="1"/>
                </body>"""


def compile_model(cubes: int, image_size: int) -> mujoco.MjModel:
    """Compiles the model with `cubes` cubes; colours, pads and the camera are set for each episode."""
    half = {"half": CUBE}
    finger = {"length": HAND_LENGTH, "travel": FINGER_TRAVEL}
    spread = 0.006  # metres from the joint of a finger to its middle
    xml = f"""
<mujoco model="tabletop">
  <compiler angle="radian" autolimits="true"/>
  <option timestep="{TIMESTEP}" integrator="implicitfast" cone="elliptic" impratio="10">
    <flag autoreset="disable"/>
  </option>
  <size memory="2M"/>
  <visual>
    <quality shadowsize="0" offsamples="0" numslices="12" numstacks="6" numquads="1"/>
    <global offwidth="{image_size}" offheight="{image_size}"/>
    <headlight ambient=".45 .45 .45" diffuse=".45 .45 .45" specular="0 0 0"/>
    <map znear="0.02" zfar="20"/>
  </visual>
  <default>
    <geom condim="4" solref="0.01 1" solimp="0.95 0.99 0.001" rgba=".75 .75 .78 1"/>
    <default class="arm">
      <geom type="capsule" contype="0" conaffinity="0"/>
      <joint type="hinge" armature="0.05" damping="2"/>
    </default>
  </default>
  <worldbody>
    <light pos="0.5 0 1.5" dir="0 0 -1" diffuse=".3 .3 .3" specular="0 0 0" castshadow="false"/>
    <camera name="front" pos="0.9 0 0.6" fovy="32"/>
    <geom name="table" type="plane" size="3 3 0.1" rgba=".55 .5 .45 1" friction="1 0.02 0.001"/>
    <body name="base" gravcomp="1" childclass="arm">
      <geom type="cylinder" fromto="0 0 0 0 0 {SHOULDER_HEIGHT - 0.04}" size="0.05"/>
      <joint name="base" axis="0 0 1" range="-1.2 1.2"/>
      <body name="upper" pos="0 0 {SHOULDER_HEIGHT}" gravcomp="1">
        <joint name="shoulder" axis="0 -1 0" range="-0.5 2.6"/>
        <geom fromto="0 0 0 {UPPER_ARM} 0 0" size="0.025" mass="0.5"/>
        <body name="fore" pos="{UPPER_ARM} 0 0" gravcomp="1">
          <joint name="elbow" axis="0 -1 0" range="-2.9 -0.1"/>
          <geom fromto="0 0 0 {FOREARM} 0 0" size="0.02" mass="0.4"/>
          <body name="wrist" pos="{FOREARM} 0 0" gravcomp="1">
            <joint name="wrist" axis="0 -1 0" range="-2.6 2.6"/>
            <geom fromto="0 0 0 0 0 -0.05" size="0.018" mass="0.1"/>
            <body name="hand" gravcomp="1">
              <joint name="hand" axis="0 0 1" range="-1.2 1.2"/>
              <geom type="box" pos="0 0 -0.075" size="0.014 0.052 0.01" mass="0.1" rgba=".3 .3 .32 1"/>
              <site name="tip" pos="0 0 -{HAND_LENGTH}" size="0.002" rgba="0 0 0 0"/>{
        "".join(
            _FINGER.format(side=side, sign=sign, offset=sign * spread, **finger)
            for side, sign in (("left", 1), ("right", -1))
        )
    }
            </body>
          </body>
        </body>
      </body>
    </body>{"".join(_CUBE.format(i=i, x=0.1 + 0.1 * i, **half) for i in range(cubes))}{
        "".join(_PAD.format(i=i, x=0.2 * i, half=PAD) for i in range(PADS))
    }
  </worldbody>
  <contact><exclude body1="left" body2="right"/></contact>
  <equality><joint joint1="left" joint2="right"/></equality>
  <actuator>{
        "".join(
            f'<position joint="{joint}" kp="{STIFFNESS}" dampratio="1" timeconst="{SMOOTHING}"/>'
            for joint in ("base", "shoulder", "elbow", "wrist", "hand")
        )
    }
    <position joint="left" kp="400" dampratio="1" forcerange="-8 8"/>
    <position joint="right" kp="400" dampratio="1" forcerange="-8 8"/>
  </actuator>
</mujoco>"""
    return mujoco.MjModel.from_xml_string(xml)
