"""Questions of the home and of the box itself: the device, rooms, stains, reminders, unit conversion."""

from examples.demo_model.topics.topic import Topic, Voice, single

_DEVICE = (
    single(
        "restart",
        ("How do I restart the box?", "The box [is stuck|hangs]. What now?", "Can I reboot [this device|the box]?"),
        Voice(
            ("Please hold the power button for five seconds, and the box will restart.",),
            (
                "I would suggest saving your work prior to this step.",
                "The light will turn green after approximately one minute, and you may continue.",
                "Should the problem persist, please disconnect the power cable for a moment.",
            ),
        ),
        Voice(
            ("Just hold the power button for five seconds, and it's back!",),
            (
                "Save your stuff first, just in case.",
                "Give it like a minute, and when the light's green you're good.",
                "If it's still acting up, just pull the plug for a moment.",
            ),
        ),
    ),
    single(
        "wifi",
        ("How do I connect [the box|this box] to the network?", "The network [is slow|does not work]. What can I do?"),
        Voice(
            ("Please open the settings, select your network and enter the password.",),
            (
                "It is advisable to place the box near the router, free of obstacles.",
                "Should the connection remain slow, I would suggest the use of a cable.",
                "You may verify the connection on the status page at any time.",
            ),
        ),
        Voice(
            ("Just open the settings, pick your network and punch in the password.",),
            (
                "Stick the box close to the router, walls aren't your friend.",
                "If it's still slow, just grab a cable, that always does it.",
                "You can peek at the status page whenever you're not sure.",
            ),
        ),
    ),
    single(
        "update",
        ("How do I update the box?", "Is there [a new version|an update]?", "How do I install the update?"),
        Voice(
            ("Please open the settings and select the update, which requires about ten minutes.",),
            (
                "It is important that the power is not interrupted in the meantime.",
                "I would recommend the evening, when nobody requires the box.",
                "You may continue your work after the restart, and all data will remain.",
            ),
        ),
        Voice(
            ("Just hit update in the settings, it's done in about ten minutes!",),
            (
                "Don't pull the plug while it's running, okay?",
                "I'd do it in the evening when nobody's using the box.",
                "Once it's back up, all your stuff's still there, no worries.",
            ),
        ),
    ),
    single(
        "disk",
        ("The disk is full. What [can|should] I do?", "How do I free some space on the box?"),
        Voice(
            ("I recommend deleting old recordings, which require the most space.",),
            (
                "Please copy important files to another disk prior to this.",
                "You may find the largest files on the storage page of the settings.",
                "It is advisable to keep a tenth of the disk free at all times.",
            ),
        ),
        Voice(
            ("Just dump some old recordings, they're the big ones!",),
            (
                "Copy the stuff you care about to another disk first.",
                "The storage page shows what's hogging the space, it's pretty handy.",
                "Don't fill it to the top, a bit of free space keeps it quick.",
            ),
        ),
    ),
    single(
        "hot",
        (
            "The box is [very hot|hot]. Is that normal?",
            "Why is the fan so loud?",
            "What temperature is fine for the box?",
        ),
        Voice(
            (
                "It is normal up to {limit}, beyond that please improve the cooling.",
                "Please do not be concerned, the box is designed for up to {limit}.",
            ),
            (
                "I would recommend at least {gap} of free space on each side.",
                "Please remove the dust from the fan, which may be done with a soft brush.",
                "Should the temperature exceed {limit}, the box will reduce its speed.",
            ),
        ),
        Voice(
            (
                "Don't worry, it's fine up to {limit}.",
                "Yeah, it's just busy, anything up to {limit} is okay!",
            ),
            (
                "Give it about {gap} of space on each side, it's gotta breathe.",
                "Get the dust off the fan with a soft brush, that's often all it takes.",
                "If it's over {limit}, it'll just slow down a bit.",
            ),
        ),
        weight=0.5,
        facts={"limit": ("80 °C", "176 °F"), "gap": ("10 cm", "4 inches")},
    ),
)

ROOM = Topic(
    name="room",
    weight=1.4,
    has_units=True,
    questions=(
        "Set the {room} to {temp}.",
        "[Please make|Make] the {room} {temp}.",
        "Heat the {room} to {temp}, please.",
        "I want {temp} in the {room}.",
    ),
    follow_ups=("And the {room} to {temp}.", "Now {temp} in the {room}."),
    slots=(
        tuple({"room": room} for room in ("living room", "kitchen", "bedroom", "bathroom", "office", "hall")),
        (
            {"temp": ("17 °C", "63 °F")},
            {"temp": ("18 °C", "64 °F")},
            {"temp": ("19 °C", "66 °F")},
            {"temp": ("20 °C", "68 °F")},
            {"temp": ("21 °C", "70 °F")},
            {"temp": ("22 °C", "72 °F")},
            {"temp": ("23 °C", "73 °F")},
            {"temp": ("24 °C", "75 °F")},
        ),
    ),
    formal=Voice(
        core=(
            "Certainly, the {room} will be set to {temp}.",
            "I have set the {room} to {temp}, as you wish.",
            "It is my pleasure, the {room} will reach {temp} shortly.",
        ),
        extra=(
            "Please allow approximately twenty minutes until the {room} has reached {temp}.",
            "I would suggest keeping the windows closed in the meantime.",
            "You may change the setting at any time, either here or on the wall.",
            "It is advisable to choose a lower temperature for the night.",
        ),
    ),
    casual=Voice(
        core=(
            "Sure, the {room}'s going to {temp}!",
            "Got it, {temp} for the {room}!",
            "Okay, I'm setting the {room} to {temp}.",
        ),
        extra=(
            "It'll take like twenty minutes until the {room}'s at {temp}.",
            "Keep the windows shut for now, or it won't get there.",
            "You can change it whenever you want, just tell me or tap the wall thing.",
            "For the night I'd go a bit lower, you'll sleep way better.",
        ),
    ),
)

STAIN = Topic(
    name="stain",
    weight=1.2,
    has_units=True,
    questions=(
        "How do I remove {stain} from [a shirt|a jacket|my trousers]?",
        "I have {stain} on [my shirt|my jacket|the tablecloth]. What now?",
        "What helps against {stain} stains?",
    ),
    follow_ups=("And {stain}?", "What about {stain}?"),
    slots=(
        tuple(
            {"stain": stain, "with": agent, "wash": wash, "wait": wait}
            for stain, agent, wash, wait in (
                ("coffee", "cold water and soap", ("40 °C", "104 °F"), "ten minutes"),
                ("red wine", "salt and cold water", ("40 °C", "104 °F"), "an hour"),
                ("grass", "vinegar", ("40 °C", "104 °F"), "half an hour"),
                ("ink", "milk", ("30 °C", "86 °F"), "an hour"),
                ("oil", "dish soap", ("60 °C", "140 °F"), "ten minutes"),
                ("chocolate", "cold water and soap", ("40 °C", "104 °F"), "ten minutes"),
                ("tomato sauce", "lemon juice", ("60 °C", "140 °F"), "half an hour"),
            )
        ),
    ),
    formal=Voice(
        core=(
            "I [recommend|would recommend] treating {stain} with {with} and washing at {wash}.",
            "Please apply {with} for {wait}, then wash at {wash}.",
            "It is best to use {with} against {stain} and to wash at {wash}.",
        ),
        extra=(
            "Please do not rub the {stain}, as this would spread the stain further.",
            "It is advisable to wait for {wait} until {with} can take effect.",
            "You may wish to test a hidden part of the fabric beforehand.",
            "Should the stain remain, I would suggest a second treatment.",
        ),
    ),
    casual=Voice(
        core=(
            "Just dab some {with} on it and wash it at {wash}.",
            "{with} should do the trick, then wash it at {wash}!",
            "Grab {with}, give it {wait} and chuck it in the wash at {wash}.",
        ),
        extra=(
            "Don't rub the {stain}, that'll just make it worse.",
            "Give it about {wait}, {with} can't do magic right away.",
            "Try it on a spot that nobody sees first, just to be safe.",
            "If it's still there, no worries, just do it again.",
        ),
    ),
)

REMIND = Topic(
    name="remind",
    weight=1.2,
    questions=(
        "Remind me to {task} at {time}.",
        "[Please remind|Can you remind] me to {task} at {time}?",
        "I have to {task} at {time}. [Do not let me forget.|Can you remind me?]",
    ),
    follow_ups=("And remind me to {task} at {time}.", "Also to {task} at {time}."),
    slots=(
        tuple(
            {"task": task}
            for task in (
                "call [Anna|Ben|Carla|David|Emma|Farid]",
                "feed the [cat|dog|fish]",
                "take out the bins",
                "buy [milk|bread|flowers|stamps]",
                "water the plants",
                "pay the rent",
                "charge the [bike|car|phone]",
                "book the [train|table|tickets]",
            )
        ),
        tuple({"time": f"{hour} {half}"} for hour in range(1, 12) for half in ("am", "pm")),
    ),
    formal=Voice(
        core=(
            "Certainly, I will remind you to {task} at {time}.",
            "Of course, the reminder to {task} is set for {time}.",
            "It is noted, you will be reminded at {time} to {task}.",
        ),
        extra=(
            "Please inform me should you wish to change the time.",
            "The reminder will be shown on the screen, accompanied by a quiet sound.",
            "You may request a list of all reminders at any moment.",
            "I would suggest preparing everything that you require in advance.",
        ),
    ),
    casual=Voice(
        core=(
            "Sure, I'll nudge you at {time} to {task}!",
            "Got it, {task} at {time}, no worries!",
            "Okay, I'll ping you at {time} so you don't forget to {task}.",
        ),
        extra=(
            "If you wanna change the time, just tell me.",
            "It'll pop up on the screen with a tiny beep.",
            "You can ask me for the whole list whenever you're curious.",
            "Maybe get your stuff ready a bit before that, it's less of a rush.",
        ),
    ),
)

CONVERT = Topic(
    name="convert",
    weight=1.4,
    questions=(
        "How much is {left} in {unit}?",
        "Convert {left} to {unit}.",
        "What is {left} in {unit}?",
    ),
    follow_ups=("And {left} in {unit}?",),
    slots=(
        tuple(
            {"left": left, "unit": unit, "right": f"{right} {unit}"}
            for left, right, unit in (
                ("1 mile", "1.6", "km"),
                ("5 miles", "8", "km"),
                ("10 miles", "16", "km"),
                ("1 inch", "2.5", "cm"),
                ("10 inches", "25", "cm"),
                ("1 foot", "30", "cm"),
                ("6 feet", "183", "cm"),
                ("1 pound", "454", "grams"),
                ("2 pounds", "907", "grams"),
                ("1 cup", "240", "ml"),
                ("1 ounce", "28", "grams"),
                ("10 km", "6.2", "miles"),
                ("1 metre", "39", "inches"),
                ("1 kg", "2.2", "pounds"),
                ("5 kg", "11", "pounds"),
                ("100 grams", "3.5", "ounces"),
                ("1 litre", "34", "fluid ounces"),
            )
        ),
    ),
    formal=Voice(
        core=(
            "{left} is approximately equal to {right}.",
            "I would calculate that {left} corresponds to {right}.",
            "It is approximately {right}.",
        ),
        extra=(
            "Please note that the value has been rounded for convenience.",
            "Should you require a more precise figure, I would be delighted to assist.",
            "You may use the same factor for other amounts, which is often sufficient.",
        ),
    ),
    casual=Voice(
        core=(
            "That's about {right}!",
            "{left}? That's like {right}.",
            "It's {right}, more or less.",
        ),
        extra=(
            "I've rounded that a bit, so don't take it too seriously.",
            "If you need it more exact, just ask, no worries.",
            "It's the same trick for other amounts, that's pretty handy.",
        ),
    ),
)

TOPICS = (*_DEVICE, ROOM, STAIN, REMIND, CONVERT)
