-- KEYS: the five lease keys. ARGV: owner, 1 if the delivery counts as a strike, ids in the order of their arrival.
-- Returns how many of them were still the owner's.
local released = 0
for i = #ARGV, 3, -1 do -- the last to be put back is the first to be popped
  local list = owned_list(ARGV[i], ARGV[1])
  if list then
    if ARGV[2] == '0' then take_back_strike(ARGV[i]) end
    put_back(ARGV[i], list)
    released = released + 1
  end
end
return released
